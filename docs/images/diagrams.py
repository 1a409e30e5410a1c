"""The article's four diagrams, for this engine: calls, start, states of a request, schedule.

Knows how to place boxes and arrows, and the words in both languages. `draw.py` writes the files.
"""

from __future__ import annotations

import html
from dataclasses import dataclass, field

# Light and dark, as the reader's system has it. Text has an edge, since it may cross a line.
STYLE = """
rect.page { fill: #ffffff }
.box { fill: #eef3fb; stroke: #3b5b92 }
.end { fill: #e9f5ec; stroke: #2f7d4f }
.choice { fill: #fdf4e3; stroke: #a4711b }
.line { stroke: #57606a; fill: none }
.dash { stroke-dasharray: 5 4 }
path.tip { fill: #57606a }
text { font: 14px sans-serif; fill: #1f2328 }
text.small { font-size: 12px; fill: #57606a }
text.beside { font-size: 12px; fill: #57606a }
text.beside { paint-order: stroke; stroke: #ffffff; stroke-width: 5 }
@media (prefers-color-scheme: dark) {
rect.page { fill: #1f2328 }
.box { fill: #22304a; stroke: #8fb0ea }
.end { fill: #1f3a2a; stroke: #7cc79a }
.choice { fill: #40331a; stroke: #e0b35c }
.line { stroke: #9da7b1 }
path.tip { fill: #9da7b1 }
text { fill: #e6edf3 }
text.small { fill: #9da7b1 }
text.beside { fill: #9da7b1; stroke: #1f2328 }
}
"""
TIP = """<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8"
orient="auto"><path class="tip" d="M0 0L8 4L0 8z"/></marker>"""


@dataclass
class Figure:
    """Shapes, by their places in pixels."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", kind: str = "") -> None:
        """Put one line at a place."""
        words = html.escape(words)
        self.parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'
        )

    def box(self, x: float, y: float, width: float, words: str, kind: str = "box") -> None:
        """Draw a box whose middle is at (x, y): a line of words, and a smaller one below."""
        first, _, second = words.partition("\n")
        place = f'x="{x - width / 2}" y="{y - 22}" width="{width}" height="44"'
        self.parts.append(f'<rect class="{kind}" {place} rx="8"/>')
        self.text(x, y - 3 if second else y + 5, first)
        if second:
            self.text(x, y + 15, second, kind="small")

    def arrow(self, points: list[tuple[float, float]], words: str = "", dash: str = "") -> None:
        """Draw a line through points, with a tip at its end, and words above its first part."""
        path = " L".join(f"{x} {y}" for x, y in points)
        self.parts.append(f'<path class="line {dash}" d="M{path}" marker-end="url(#tip)"/>')
        if words:
            (x1, y1), (x2, y2) = points[:2]
            is_flat = y1 == y2
            x, y = (x1 + x2) / 2 + (0 if is_flat else 8), (y1 + y2) / 2 - (6 if is_flat else -4)
            self.text(x, y, words, "middle" if is_flat else "start", "beside")

    def svg(self) -> str:
        """The file."""
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" xmlns="http://www.w3.org/2000/svg">\n'
            f"<style>{STYLE}</style>\n"
            f"<defs>{TIP}</defs>\n"
            f'<rect class="page" width="{self.width}" height="{self.height}" rx="8"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def calls(*, zh: bool) -> Figure:
    """One generate(), as calls between four objects."""
    figure = Figure(760, 480)
    lives = {"generate()": 90, "EngineCore": 290, "Scheduler": 490, "ModelRunner": 670}
    for name, x in lives.items():
        figure.box(x, 34, 140, name)
        figure.parts.append(f'<path class="line dash" d="M{x} 56 L{x} 462"/>')
    enqueue, loop, wait, ended, back = (
        (
            "add_request：进入 waiting 队列",
            "直到 waiting、running 都空",
            "token_ids()：等这一步算完",
            "本步结束的序列",
            "解码成文本，按 prompt 的顺序返回",
        )
        if zh
        else (
            "add_request: to the waiting queue",
            "until both queues are empty",
            "token_ids(): waits for the step",
            "the sequences that ended",
            "decode the text, in the prompts' order",
        )
    )
    x = list(lives.values())
    figure.arrow([(x[0], 90), (x[2], 90)], enqueue)
    figure.parts.append('<rect class="line dash" x="20" y="112" width="724" height="296" rx="6"/>')
    figure.text(32, 130, loop, "start", "beside")
    rows = [(0, 1, "step()", ""), (1, 2, "schedule()", ""), (2, 1, "Batch", "dash")]
    rows += [(1, 3, "launch(batch)", ""), (3, 1, wait, "dash"), (1, 2, "postprocess()", "")]
    rows += [(2, 1, ended, "dash"), (1, 0, ended, "dash")]
    for number, (start, end, message, dash) in enumerate(rows):
        y = 158 + 32 * number
        figure.arrow([(x[start], y), (x[end], y)], message, dash)
    figure.text(x[0] - 70, 444, back, "start", "beside")
    return figure


def start(*, zh: bool) -> Figure:
    """The start of an engine, top to bottom, with the events that record it."""
    rows = [
        ("Config", "读取并检查配置", "read and check the settings", "ENGINE_INIT"),
        ("Tokenizer", "结束符", "the end-of-sequence tokens", ""),
        (
            "ranks",
            "有几个进程，每个占一份",
            "the processes that share the model",
            "TP_RUNTIME_INIT",
        ),
        ("load_model", "权重到设备上", "the weights, on the device", "MODEL_WEIGHTS_LOADED"),
        (
            "warm-up",
            "假数据跑最大的 prefill（GPU）",
            "the largest prefill, of dummy tokens (GPU)",
            "WARMUP_MODEL",
        ),
        (
            "KV cache",
            "算块数，分配，绑定到各层",
            "how many blocks fit; allocate them",
            "KV_BUDGET_ESTIMATE",
        ),
        (
            "CUDA Graph",
            "每个档位录一张 decode 图（GPU）",
            "a graph for each batch size (GPU)",
            "CUDAGRAPH_CAPTURE",
        ),
        (
            "Scheduler",
            "用块数建 BlockManager",
            "the block manager, with these blocks",
            "ENGINE_READY",
        ),
    ]
    figure = Figure(700, 40 + 66 * len(rows))
    for number, (name, chinese, english, event) in enumerate(rows):
        y = 44 + 66 * number
        figure.box(
            210,
            y,
            340,
            f"{name}\n{chinese if zh else english}",
            "end" if event == "ENGINE_READY" else "box",
        )
        if number:
            figure.arrow([(210, y - 44), (210, y - 23)])
        if event:
            figure.text(400, y + 5, event, "start", "beside")
    return figure


def states(*, zh: bool) -> Figure:
    """A request from arrival to end."""
    figure = Figure(760, 210)
    figure.box(110, 70, 150, "WAITING\n" + ("不占块" if zh else "holds no block"))
    figure.box(
        400, 70, 170, "RUNNING\n" + ("占着所有 token 的块" if zh else "holds its tokens' blocks")
    )
    figure.box(670, 70, 130, "FINISHED\n" + ("块已释放" if zh else "blocks are free"), "end")
    figure.arrow([(186, 70), (314, 70)], "准入，prefill" if zh else "admitted")
    figure.arrow([(486, 70), (604, 70)], "结束" if zh else "ends")
    figure.text(545, 92, "eos, stop_token,", kind="small")
    figure.text(545, 108, "stop_string, max_tokens,", kind="small")
    figure.text(545, 124, "max_model_len", kind="small")
    figure.arrow([(400, 93), (400, 150), (110, 150), (110, 93)])
    figure.text(
        255, 144, "抢占：块不够，以后重新计算" if zh else "preempted: too few blocks", kind="small"
    )
    figure.arrow([(60, 93), (60, 190), (670, 190), (670, 93)], "", "dash")
    figure.text(
        365, 184, "中止（从哪个状态都可以）" if zh else "aborted, from either state", kind="small"
    )
    return figure


def schedule(*, zh: bool) -> Figure:
    """How the policy prefill_first fills a batch."""
    figure = Figure(760, 470)

    def word(chinese: str, english: str) -> str:
        return chinese if zh else english

    figure.box(250, 40, 200, "schedule()")
    figure.box(
        250,
        120,
        380,
        word("有没算完的 prompt？", "Is a prompt computed in part?")
        + "\nScheduler.continue_prefill",
        "choice",
    )
    figure.box(
        250,
        210,
        380,
        word("队首能准入吗？", "Can the head of the waiting queue be admitted?")
        + "\nScheduler.admit",
        "choice",
    )
    figure.box(
        250, 300, 380, word("batch 里有 prompt 吗？", "Is there a prompt in the batch?"), "choice"
    )
    figure.box(620, 300, 200, "prefill", "end")
    figure.box(
        250,
        390,
        380,
        word("running 每条一个 token", "one token of each running sequence")
        + "\n"
        + word("块不够：抢占队尾", "too few blocks: preempt the tail"),
    )
    figure.box(620, 390, 200, "decode", "end")
    for y in (first := 62, 142, 232):
        figure.arrow([(250, y), (250, y + 35 + 11 * (y != first))])
    figure.arrow([(441, 210), (490, 210), (490, 170), (250, 170), (250, 187)])
    figure.text(
        258, 162, word("有：先算它的下一段", "yes: its next chunk first"), "start", "beside"
    )
    figure.text(496, 195, word("能：再看下一条", "yes: look at the next one"), "start", "beside")
    figure.text(
        258,
        262,
        word("不能：token 预算、块、序列数到上限", "no: tokens, blocks or sequences are used up"),
        "start",
        "small",
    )
    figure.arrow([(441, 300), (519, 300)], word("有", "yes"))
    figure.arrow([(250, 322), (250, 367)], word("没有", "no"))
    figure.arrow([(441, 390), (519, 390)])
    figure.text(
        380,
        448,
        word(
            "一句话：有新请求就 prefill，没有就 decode；块不够就抢占。",
            "New requests first, else a decode; if blocks run out, preempt.",
        ),
        kind="small",
    )
    return figure


FIGURES = {"calls": calls, "start": start, "states": states, "schedule": schedule}
