"""Broken model folders: `LLM` and `nvtrace run` refuse each by name, and no older trace is lost.

What the loader and the config reader do by themselves is tested with them; here it is what a user
sees. A sentence names the file, the tensor or the field, and says what to do.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.engine import model_runner
from nanovllm.errors import ModelConfigError, NanoVLLMError, TokenizerError, WeightsError
from nanovllm.models import qwen3
from nanovllm.utils.model_config import ModelConfig
from support.cli import call
from support.models import edit_config, load, make_reference, save_reference
from support.oracle import Narrator, make_llm, save_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    Spoil = Callable[[Path], object]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
LONG_NAME = "x" * 300
TOKENIZER_FILES = (
    *("tokenizer.json", "vocab.json", "merges.txt", "tokenizer_config.json"),
    *("added_tokens.json", "special_tokens_map.json", "chat_template.jinja"),
)


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything in it, to be copied from."""
    folder = tmp_path_factory.mktemp("good")
    save_reference(make_reference(), folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """A folder to spoil."""
    return shutil.copytree(good, tmp_path / "model")


@pytest.fixture(autouse=True)
def _in_a_fresh_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


# -- ways to spoil a folder ------------------------------------------------------------------------


def cut(num_bytes: int) -> Spoil:
    """Keep so many bytes of the weights; a negative number counts from the end."""
    return lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:num_bytes])


def overwrite(begin: bytes) -> Spoil:
    """Put other bytes at the beginning of the weights."""
    return lambda f: (f / WEIGHTS).write_bytes(begin + (f / WEIGHTS).read_bytes()[len(begin) :])


def overlap(folder: Path) -> None:
    """Let two tensors lie on the same bytes."""
    data = (folder / WEIGHTS).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header["lm_head.weight"]["data_offsets"] = header[EMBEDDING]["data_offsets"]
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[end:])


def put(name: str, *numbers: float, dtype: torch.dtype | None = None) -> Spoil:
    """Put numbers into a tensor; a dtype casts all tensors first."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
        tensors[name].view(-1)[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
        save_file(tensors, folder / WEIGHTS)

    return spoil


def tie(folder: Path) -> None:
    """Take the head away, as a tied checkpoint has none; the config goes on saying it has."""
    tensors = load_file(folder / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / WEIGHTS)


def say(**changes: object) -> Spoil:
    """Change fields of config.json."""
    return lambda f: edit_config(f, changes)


def write(name: str, text: str) -> Spoil:
    """Write a file."""
    return lambda f: (f / name).write_text(text, encoding="utf-8")


def remove(*names: str) -> Spoil:
    """Remove files."""

    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def point(name: str, target: str) -> Spoil:
    """Make a name a link; to itself, say."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def become(name: str, make: Callable[[Path], object]) -> Spoil:
    """Put something else in a file's place."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return spoil


def shards(then: Spoil) -> Spoil:
    """Split the weights in two files with an index, and spoil those."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        weight_map: dict[str, str] = {}
        for number in (1, 2):
            file = f"model-0000{number}-of-00002.safetensors"
            part = {name: tensors[name] for name in sorted(tensors)[number - 1 :: 2]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        then(folder)

    return spoil


def index(file: str) -> Spoil:
    """Let the index name a file."""
    return shards(write(INDEX, json.dumps({"weight_map": {NORM: file}})))


def add_tokens(ids: dict[str, int], eos: str = "<end>") -> Spoil:
    """Add tokens to the tokenizer beside its vocabulary, as `add_tokens` of transformers does."""

    def spoil(folder: Path) -> None:
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text(encoding="utf-8"))
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"] += [
            {"id": token_id, "content": token, "special": True, **flags}
            for token, token_id in ids.items()
        ]
        file.write_text(json.dumps(content), encoding="utf-8")
        file = folder / "tokenizer_config.json"
        content = json.loads(file.read_text(encoding="utf-8")) | {"eos_token": eos}
        file.write_text(json.dumps(content), encoding="utf-8")

    return spoil


def give_a_word_the_id(token_id: int) -> Spoil:
    """Add a word to the tokenizer."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        content["model"]["vocab"]["far"] = token_id
        (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")

    return spoil


def rename(change: Callable[[str], str | None]) -> Spoil:
    """Give the tensors other names; None drops one."""

    def spoil(folder: Path) -> None:
        tensors = {change(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
        save_file({name: t for name, t in tensors.items() if name is not None}, folder / WEIGHTS)

    return spoil


def strip(name: str) -> str | None:
    """The name in a checkpoint of the model without its head, as Qwen3-Embedding is one."""
    return None if name == "lm_head.weight" else name.removeprefix("model.")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def lfs(name: str) -> Spoil:
    """Put in a file's place what git leaves there without LFS."""
    return write(name, POINTER)


def encoded_pointer(name: str, encoding: str) -> Spoil:
    """The same, as an editor or a shell of Windows leaves it."""
    text = POINTER.replace("\n", "\r\n")
    return lambda folder: (folder / name).write_bytes(text.encode(encoding))


def annex(name: str) -> Spoil:
    """Put in a file's place what git-annex leaves there."""
    return write(name, "/annex/objects/SHA256E-s1--0.safetensors\n")


# -- each is refused -------------------------------------------------------------------------------

CUT = "is not a complete safetensors file"
LOOP = "cannot be read: Too many levels of symbolic links (it is a link to"
NOWHERE = "cannot be read: No such file or directory (it is a link to nowhere)"
HUGE = 10**9
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
LFS = ["is a Git LFS pointer", "git lfs pull"]
ANNEX = ["is a git-annex pointer", "git annex get"]

WEIGHTS_CASES: dict[str, tuple[Spoil, list[str]]] = {
    "cut in the length of the header": (cut(5), [WEIGHTS, CUT]),
    "cut in the header": (cut(300), [WEIGHTS, CUT, "download it again"]),
    "cut in the data": (cut(-10), [WEIGHTS, CUT]),
    "empty": (cut(0), [WEIGHTS, CUT]),
    "a header of any length": (overwrite(b"\xff" * 8), [WEIGHTS, CUT]),
    "a header of no length": (overwrite(b"\0" * 8), [WEIGHTS, CUT]),
    "a header that is no JSON": (overwrite(struct.pack("<Q", 9) + b"{'a': 1}"), [WEIGHTS, CUT]),
    "tensors that overlap": (overlap, [WEIGHTS, CUT]),
    "a NaN": (put(NORM, torch.nan), [WEIGHTS, NORM, "1 numbers that are not finite", "of 64"]),
    "infinities": (put(QUERY, torch.inf, -torch.inf), [QUERY, "2 numbers that are not finite"]),
    "a NaN in bfloat16": (
        put(QUERY, torch.nan, dtype=torch.bfloat16),
        [QUERY, "1 numbers", "download it again"],
    ),
    "a number past float32": (
        put(QUERY, 1e300, dtype=torch.float64),
        [QUERY, "1e+300", "float32 (up to 3.40282e+38) does not hold", "no dtype"],
    ),
    "another hidden_size": (
        say(hidden_size=128),
        [EMBEDDING, "(128, 64)", "(128, 128)", "look at hidden_size"],
    ),
    "more layers": (
        say(num_hidden_layers=3, layer_types=None),
        ["lacks model.layers.2.", "look at num_hidden_layers"],
    ),
    "a pointer for the weights": (lfs(WEIGHTS), [WEIGHTS, *LFS]),
    **{
        f"a pointer in {encoding}": (encoded_pointer(WEIGHTS, encoding), [WEIGHTS, *LFS])
        for encoding in ("utf-8", "utf-8-sig", "utf-16")
    },
    "a pointer of git-annex": (annex(WEIGHTS), [WEIGHTS, *ANNEX]),
    "the names of a compiled model": (
        rename("_orig_mod.{}".format),
        ["_orig_mod.model.embed_tokens.weight", "saved from torch.compile", "remove the prefix"],
    ),
    "the names of compiled layers": (
        rename(lambda name: name.replace(".self_attn.", "._orig_mod.self_attn.")),
        ["layers.0._orig_mod.self_attn", "saved from torch.compile", "'_orig_mod.'"],
    ),
    "the names of a model that ranks share": (
        rename("module.{}".format),
        ["module.model.embed_tokens.weight", "saved from DistributedDataParallel"],
    ),
    "a pointer for a shard": (shards(lfs(SHARD)), [SHARD, *LFS]),
    "a pointer for the index": (shards(lfs(INDEX)), [INDEX, *LFS]),
    "a model for embeddings": (
        rename(strip),
        ["holds embed_tokens.weight instead of model.embed_tokens.weight", "without a head"],
    ),
    "a part of another model": (
        rename(lambda name: f"language_model.{name}"),
        [f"language_model.{EMBEDDING} instead of {EMBEDDING}", "another model"],
    ),
    "many layers": (
        say(num_hidden_layers=HUGE, layer_types=None),
        ["lacks model.layers.2.", f"look at num_hidden_layers = {HUGE}"],
    ),
    "a huge width": (say(hidden_size=HUGE), [EMBEDDING, f"{HUGE}", "look at hidden_size"]),
    "a huge vocabulary": (say(vocab_size=HUGE), [EMBEDDING, f"{HUGE}", "look at vocab_size"]),
    "a huge MLP": (
        say(intermediate_size=HUGE),
        ["gate_proj.weight", f"{HUGE}", "look at intermediate_size"],
    ),
    "many heads": (
        say(num_attention_heads=HUGE, num_key_value_heads=HUGE),
        ["q_proj.weight", f"{16 * HUGE}", "look at num_attention_heads, head_dim"],
    ),
    "a huge head": (
        say(head_dim=HUGE),
        ["q_proj.weight", f"{4 * HUGE}", "look at num_attention_heads, head_dim"],
    ),
    "fewer layers": (
        say(num_hidden_layers=1, layer_types=None),
        [WEIGHTS, "holds model.layers.1.", "look at num_hidden_layers"],
    ),
    "a larger vocabulary": (
        say(vocab_size=256),
        [EMBEDDING, "(128, 64)", "(256, 64)", "look at vocab_size"],
    ),
    "another head_dim": (
        say(head_dim=32),
        ["q_proj.weight", "(64, 64)", "(128, 64)", "look at num_attention_heads, head_dim"],
    ),
    "more KV heads": (
        say(num_key_value_heads=4),
        ["k_proj.weight", "(32, 64)", "(64, 64)", "look at num_key_value_heads, head_dim"],
    ),
    "another intermediate_size": (
        say(intermediate_size=100),
        ["gate_proj.weight", "(96, 64)", "(100, 64)", "look at intermediate_size"],
    ),
    "tied by the config only": (
        say(tie_word_embeddings=True),
        ["lm_head.weight", EMBEDDING, "tie_word_embeddings"],
    ),
    "tied by the weights only": (tie, ["lacks lm_head.weight", "look at tie_word_embeddings"]),
    "weights that are a circle of links": (point(WEIGHTS, WEIGHTS), [WEIGHTS, LOOP]),
    "weights that are a link to nowhere": (point(WEIGHTS, "nowhere"), [WEIGHTS, NOWHERE]),
    "weights that are a folder": (become(WEIGHTS, Path.mkdir), [WEIGHTS, "it is a folder"]),
    "weights that are a pipe": (become(WEIGHTS, os.mkfifo), [WEIGHTS, "not a regular file"]),
    "a shard that is a circle": (shards(point(SHARD, SHARD)), [SHARD, LOOP]),
    "a shard that leads nowhere": (shards(point(SHARD, "nowhere")), [SHARD, NOWHERE]),
    "a shard that is a folder": (shards(become(SHARD, Path.mkdir)), [SHARD, "it is a folder"]),
    "an index that is a circle": (shards(point(INDEX, INDEX)), [INDEX, LOOP]),
    "an index that leads nowhere": (shards(point(INDEX, "nowhere")), [INDEX, NOWHERE]),
    "an index that is a folder": (shards(become(INDEX, Path.mkdir)), [INDEX, "it is a folder"]),
    "a shard's name that is too long": (index(LONG_NAME), [LONG_NAME, "File name too long"]),
    "a shard's name of no letters": (index(""), [INDEX, f"weight_map.{NORM} = ''"]),
    "a shard's name with a zero": (index("a\0b"), ["cannot be read: embedded null byte"]),
}

TOKENIZER_CASES: dict[str, tuple[Spoil, list[str]]] = {
    "no vocabulary": (remove("tokenizer.json"), ["tokenizer.json or vocab.json is missing"]),
    "no tokenizer_config.json": (
        remove("tokenizer_config.json"),
        ["tokenizer_config.json is missing"],
    ),
    "a vocabulary cut off": (
        write("tokenizer.json", '{"a":'),
        ["tokenizer.json is not valid JSON"],
    ),
    "an empty vocabulary": (write("tokenizer.json", ""), ["tokenizer.json is not valid JSON"]),
    "a vocabulary of another kind": (write("tokenizer.json", "[]"), ["that transformers can load"]),
    "a vocabulary without a model": (write("tokenizer.json", "{}"), ["that transformers can load"]),
    "a config cut off": (
        write("tokenizer_config.json", "{"),
        ["tokenizer_config.json is not valid JSON"],
    ),
    "other files cut off": (
        write("special_tokens_map.json", "{"),
        ["special_tokens_map.json is not valid JSON"],
    ),
    "an id past the vocabulary": (
        give_a_word_the_id(500),
        ["the id of 'far' is 500", "vocab_size = 128"],
    ),
    "a vocabulary smaller than the tokenizer's": (
        say(vocab_size=100),
        ["the id of 'w127' is 127", "vocab_size = 100"],
    ),
    **{f"a pointer for {name}": (lfs(name), [name, *LFS]) for name in TOKENIZER_FILES},
    "an end past the vocabulary": (
        add_tokens({"<stop>": 128}, eos="<stop>"),
        ["the id of '<stop>' is 128", "vocab_size = 128"],
    ),
    "an end that is in no vocabulary": (
        add_tokens({}, eos="<sto\xdf>"),
        ["the eos_token '<sto\xdf>' is not in tokenizer.json", "tokenizer_config.json"],
    ),
    "an end past the vocabulary, not all ASCII": (
        add_tokens({"<sto\xdf>": 128}, eos="<sto\xdf>"),
        ["the id of '<sto\xdf>' is 128", "vocab_size = 128"],
    ),
    "a tokenizer that is a pointer of git-annex": (
        annex("tokenizer.json"),
        ["tokenizer.json", *ANNEX],
    ),
    "a circle of links": (point("tokenizer.json", "tokenizer.json"), ["tokenizer.json", LOOP]),
    "a link to nowhere": (point("tokenizer.json", "nowhere"), ["tokenizer.json", NOWHERE]),
    "a folder": (become("tokenizer.json", Path.mkdir), ["tokenizer.json", "it is a folder"]),
}

CONFIG_CASES: dict[str, tuple[Spoil, list[str]]] = {
    "a circle of links": (point("config.json", "config.json"), ["config.json", LOOP]),
    "a link to nowhere": (point("config.json", "nowhere"), ["config.json", NOWHERE]),
    "a folder": (become("config.json", Path.mkdir), ["config.json", "it is a folder"]),
    "a pointer": (lfs("config.json"), ["config.json", *LFS]),
    "generation_config.json is a pointer": (
        lfs("generation_config.json"),
        ["generation_config.json", *LFS],
    ),
    "generation_config.json is a circle": (
        point("generation_config.json", "generation_config.json"),
        ["generation_config.json", LOOP],
    ),
    "generation_config.json leads nowhere": (
        point("generation_config.json", "nowhere"),
        ["generation_config.json", NOWHERE],
    ),
    "layers, and too few layer_types": (
        say(num_hidden_layers=HUGE),
        ["layer_types", f"{HUGE} times"],
    ),
    "more positions than numbers": (
        say(max_position_embeddings=10**30),
        ["max_position_embeddings", "from 1 to 9223372036854775807"],
    ),
    "more than a tensor can count": (say(vocab_size=2**63), ["vocab_size", "from 1 to"]),
    "a former length past floats": (
        say(rope_parameters={**YARN, "original_max_position_embeddings": 10**400}),
        ["original_max_position_embeddings", "from 1 to"],
    ),
}

CASES: list[tuple[type[NanoVLLMError], str, Spoil, list[str]]] = [
    (error, what, spoil, parts)
    for error, cases in (
        (WeightsError, WEIGHTS_CASES),
        (TokenizerError, TOKENIZER_CASES),
        (ModelConfigError, CONFIG_CASES),
    )
    for what, (spoil, parts) in cases.items()
]


@pytest.mark.parametrize(
    ("error", "spoil", "parts"),
    [pytest.param(e, spoil, parts, id=f"{e.__name__}: {what}") for e, what, spoil, parts in CASES],
)
def test_a_broken_folder_is_refused_by_name_and_an_older_trace_stays(
    error: type[NanoVLLMError],
    spoil: Spoil,
    parts: list[str],
    copy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(copy)
    with pytest.raises(error) as caught:
        make_llm(copy)
    assert type(caught.value) is error
    for part in (str(copy), *parts):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    assert_run_refuses(copy, capsys, *parts)


def assert_run_refuses(model: Path, capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """`nvtrace run` says one line, with these parts, and no file is any other than before."""
    arguments = ("run", "example", "--model", model, "--prompt", "w5", "--max-tokens", "2")
    trace = Path("trace.jsonl")
    for older in (None, "precious"):
        if older is not None:
            trace.write_text(older, encoding="utf-8")
        outcome = call(capsys, *arguments)
        assert (outcome.code, outcome.out) == (5, ""), outcome.err
        assert outcome.err.startswith("nvtrace: ")
        assert outcome.err.count("\n") == 1
        for part in parts:
            assert part.replace("\0", r"\x00") in outcome.err
        assert [*Path.cwd().iterdir()] == ([] if older is None else [trace.absolute()])
    assert trace.read_text(encoding="utf-8") == "precious"
    trace.unlink()


# -- folders ---------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_opened_is_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "lost").symlink_to("nowhere")
    for folder, part in (
        (tmp_path / "circle", "Too many levels of symbolic links (it is a link to circle)"),
        (tmp_path / "lost", "No such file or directory (it is a link to nowhere)"),
        (tmp_path / LONG_NAME, "File name too long"),
        (good / "config.json" / "below", "Not a directory"),
        (tmp_path / "nowhere", "nowhere does not exist"),
    ):
        with pytest.raises(ModelConfigError, match="give the folder of a model") as caught:
            LLM(folder)
        assert part in str(caught.value)
        assert_run_refuses(folder, capsys, part)


def deny(path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file or folder refuse everybody, also root."""
    original = getattr(Path, method)

    def refuse(self: Path, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the method's
        if self == path or (method != "open" and path in self.parents):
            raise PermissionError(13, "Permission denied", str(self))
        return original(self, *args, **options)

    monkeypatch.setattr(Path, method, refuse)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", ModelConfigError),
        ("generation_config.json", ModelConfigError),
        ("tokenizer.json", TokenizerError),
        (WEIGHTS, WeightsError),
    ],
)
def test_a_file_that_may_not_be_read_is_refused(
    name: str,
    error: type[NanoVLLMError],
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (copy / "generation_config.json").write_text("{}")
    deny(copy / name, "open", monkeypatch)
    with pytest.raises(error, match=f"{name} cannot be read: Permission denied"):
        LLM(copy)
    assert_run_refuses(copy, capsys, f"{name} cannot be read: Permission denied")


def test_a_folder_that_may_not_be_entered_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for method in ("stat", "lstat"):
        deny(copy, method, monkeypatch)
    with pytest.raises(ModelConfigError, match="model cannot be opened: Permission denied"):
        LLM(copy)


def test_a_folder_that_may_not_be_listed_is_refused_where_that_matters(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deny(copy, "iterdir", monkeypatch)
    make_llm(copy)  # its one file of weights has the usual name
    (copy / WEIGHTS).rename(copy / "other.safetensors")
    with pytest.raises(WeightsError, match="model cannot be read: Permission denied"):
        make_llm(copy)


# -- numbers that do not fit the dtype -------------------------------------------------------------


def test_a_number_past_float16_is_refused_there_and_loaded_elsewhere(copy: Path) -> None:
    put(QUERY, 1.0, -70_000.0)(copy)
    with pytest.raises(WeightsError) as caught:
        make_llm(copy, dtype="float16")
    assert f"{QUERY} holds numbers up to 70000, which float16 (up to 65504) does not hold" in str(
        caught.value
    )
    assert "load it with dtype=bfloat16 or float32" in str(caught.value)
    for dtype in ("float32", "bfloat16"):
        make_llm(copy, dtype=dtype)


def test_the_largest_number_of_a_dtype_is_loaded(copy: Path) -> None:
    put(QUERY, 65504.0, -65504.0)(copy)
    make_llm(copy, dtype="float16")


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"num_key_value_heads": 1, "head_dim": 32}]
)
def test_the_parameters_are_counted_by_the_config_alone(
    changes: dict[str, object], tmp_path: Path
) -> None:
    save_reference(make_reference(changes), tmp_path)
    num_parameters = sum(parameter.numel() for parameter in load(tmp_path).parameters())
    assert ModelConfig.from_folder(tmp_path).num_parameters == num_parameters


def test_a_model_fits_to_the_last_byte(good: Path) -> None:
    config = ModelConfig.from_folder(good)
    room = config.num_parameters * 2 + 100 * config.head_dim * 4
    config.check_memory("model", room, bytes_per_parameter=2, num_positions=100)
    with pytest.raises(ModelConfigError, match=r"model/config\.json .* does not fit"):
        config.check_memory("model", room - 1, bytes_per_parameter=2, num_positions=100)


def test_a_model_larger_than_the_memory_is_refused(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_runner, "device_memory", lambda _device: (10_000, 10_000))
    with pytest.raises(
        ModelConfigError, match=r"does not fit into memory: \d+ parameters .* hidden_size=64"
    ):
        make_llm(good)


@pytest.mark.parametrize("num_layers", [3, 100_000])
def test_layers_that_are_not_stored_are_refused_before_any_is_built(
    num_layers: int, good: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow model of 100,000 layers fits into the memory: building it takes a minute."""
    edit_config(copy, {"num_hidden_layers": num_layers, "layer_types": None})
    built: list[ModelConfig] = []
    monkeypatch.setattr(
        qwen3.Qwen3DecoderLayer, "__init__", lambda _self, config, *_: built.append(config)
    )
    with pytest.raises(WeightsError, match=rf"num_hidden_layers = {num_layers}\)"):
        make_llm(copy)
    assert built == []
    with pytest.raises(AttributeError):  # this one is built, and has no module in it
        make_llm(good)
    assert built


def test_positions_nobody_can_reach_cost_nothing(good: Path, copy: Path) -> None:
    edit_config(copy, {"max_position_embeddings": 10**12})
    [outputs, expected] = [
        make_llm(folder, max_model_len=512).generate([[5, 6, 7]]) for folder in (copy, good)
    ]
    assert outputs == expected
    with pytest.raises(ModelConfigError, match=r"a table of 2147483647 positions \(128 GiB\)"):
        make_llm(copy, max_model_len=2**31 - 1)


# -- what is only found when it is used ------------------------------------------------------------


def test_a_folder_without_a_tokenizer_takes_token_ids_only(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remove("tokenizer.json", "tokenizer_config.json")(copy)
    llm = make_llm(copy)
    assert llm.generate([[5, 6, 7]])[0]["token_ids"]
    with pytest.raises(TokenizerError, match=r"has no tokenizer: add tokenizer\.json"):
        llm.generate(["w5"])
    assert_run_refuses(copy, capsys, "has no tokenizer: add tokenizer.json")


def test_added_tokens_without_an_embedding_do_no_harm(
    good: Path, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_tokens({"<tool>": 128, "<far>": 129})(copy)
    [outputs, expected] = [make_llm(f).generate(["w5 w6"]) for f in (copy, good)]
    assert outputs == expected
    with pytest.raises(ValueError, match=r"token id 129 is outside the vocabulary \[0, 128\)"):
        make_llm(copy).generate(["w5 <far>"])
    outcome = call(capsys, "run", "example", "--model", copy, "--prompt", "w5 <tool>")
    assert (outcome.code, outcome.out) == (5, "")
    assert "token id 128 is outside the vocabulary" in outcome.err


def test_a_chat_template_that_is_broken_is_named(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "chat_template.jinja").write_text("{% for")
    with pytest.raises(TokenizerError, match="has a chat template that cannot be rendered"):
        make_llm(copy).tokenizer.apply_chat_template("w5")
    assert_run_refuses(copy, capsys, "chat_template.jinja")


# -- by `LLM`, before the weights are said to be loaded --------------------------------------------


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def name_a_shard_that_is_not_there(folder: Path) -> None:
    index = {"weight_map": {NORM: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


SPOILT: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["no .safetensors file"]),
    "a shard is missing": (
        name_a_shard_that_is_not_there,
        ["model.safetensors.index.json", "model-00002-of-00002.safetensors"],
    ),
    "a tensor is missing": (
        lambda f: change_tensors(f, lambda tensors: tensors.pop(NORM)),
        [NORM, "model.norm"],
    ),
    "an unknown tensor": (
        lambda f: change_tensors(f, lambda tensors: tensors.update(surplus=torch.ones(1))),
        ["model.safetensors", "surplus"],
    ),
    "a wrong shape": (
        lambda f: change_tensors(f, lambda tensors: tensors.update({NORM: torch.ones(63)})),
        ["model.safetensors", NORM, "(63,)", "(64,)"],
    ),
    "a shape that would broadcast": (
        lambda f: change_tensors(f, lambda tensors: tensors.update({NORM: torch.ones(1)})),
        ["model.safetensors", NORM, "(1,)", "(64,)"],
    ),
    "no head, and not tied": (
        lambda f: change_tensors(f, lambda tensors: tensors.pop("lm_head.weight")),
        ["lm_head.weight"],
    ),
    "tied, and another head": (
        lambda f: edit_config(f, {"tie_word_embeddings": True}),
        ["lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings"],
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_wrong_checkpoints_are_refused_by_name(what: str, copy: Path) -> None:
    spoil, names = SPOILT[what]
    spoil(copy)
    narrator = Narrator()
    with pytest.raises(WeightsError) as caught:
        make_llm(copy, narrator)
    for name in (str(copy), *names):
        assert name in str(caught.value)
    assert "model_weights_loaded" not in narrator.moments


def test_wrong_folders_are_refused_by_name(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ModelConfigError, match=str(folder)):
            make_llm(folder)


@pytest.mark.parametrize("rope_type", ["dynamic", "llama3", "longrope"])
def test_rope_of_another_kind_is_refused_by_name(rope_type: str, copy: Path) -> None:
    edit_config(copy, {"rope_parameters": {"rope_type": rope_type, "rope_theta": 300.0}})
    with pytest.raises(ModelConfigError, match=f"config.json.*{rope_type}"):
        make_llm(copy)
