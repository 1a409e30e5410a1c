// Search, as the theme lacks it: in the page's own language, for words such as --policy, from a disk.
//
// The theme's search runs in a worker, which gets the pages of both languages in one message and then
// each query in another. This stands between the two. A page that was opened from a disk may have no
// worker: there its script runs in a frame. (The name of this file is one that the theme's plugin
// `offline` looks for.)

// The theme would look for a sitemap beside each of them. The menu of languages has its own links.
document.querySelectorAll("link[rel=alternate]").forEach(link => link.remove())

// The theme calls search a dialog, and gives it no name.
addEventListener("DOMContentLoaded", () => {
  const search = document.querySelector(".md-search")
  search.ariaLabel = search.querySelector("input").ariaLabel
})

const language = document.documentElement.lang
let separator

// The pages of this language only; and a query in which what the theme takes apart belongs together:
// in quotation marks, so that `kv_usage` finds no page that has but one of "kv" and "usage". The theme
// requires a Chinese word in them only behind two spaces, and never looks at the last letter of one.
function adapted({type, data}) {
  if (typeof data === "string") {
    const asked = (data.match(/"[^"]*"|\S+/g) ?? []).map(word => {
      const parts = word.split(separator).filter(part => /[\p{L}\p{N}]/u.test(part))
        .map(part => part.replace(/\p{sc=Han}+/gu, "$&〇"))
      const isTakenApart = parts.length > 1 || /\p{sc=Han}/u.test(word)
      return isTakenApart ? `"  ${parts.map(part => part + "*").join(" ")}"` : parts.join("")
    })
    return {type, data: asked.join(" ").trim()}
  }
  separator = new RegExp(data.config.separator)
  const docs = data.docs.filter(page => page.location.startsWith("zh/") === (language === "zh"))
  return {type, data: {...data, config: {...data.config, lang: [language]}, docs}}
}

// An index takes a second to make, on each page: only for who searches.
const isAsked = new Promise(resolve =>
  addEventListener("focusin", event => event.target.closest("[role=search]") && resolve()))

class OwnWorker extends Worker {
  async postMessage(message) {
    await isAsked
    super.postMessage(adapted(message))
  }
}

class FrameWorker extends EventTarget {
  constructor(script) {
    super()
    this.window = isAsked.then(() => this.open(script))
  }

  async open(script) {
    const frame = document.createElement("iframe")
    frame.hidden = true
    frame.srcdoc = "<!doctype html><title>search</title>"
    const isLoaded = new Promise(resolve => frame.addEventListener("load", resolve))
    document.documentElement.append(frame)
    await isLoaded
    const {contentWindow: inside, contentDocument: page} = frame
    const load = url => new Promise((resolve, reject) => {
      const element = page.createElement("script")
      Object.assign(element, {src: url, onload: resolve, onerror: reject})
      page.head.append(element)
    })
    inside.importScripts = (...urls) =>
      urls.reduce((loaded, url) => loaded.then(() => load(url)), Promise.resolve())
    inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
    await load(script)
    return inside
  }

  async postMessage(message) {
    const inside = await this.window
    inside.dispatchEvent(new MessageEvent("message", {data: adapted(message)}))
  }

  terminate() {}
}

window.Worker = location.protocol === "file:" ? FrameWorker : OwnWorker
if (location.protocol === "file:")
  window.IFrameWorker = FrameWorker // by this name the script finds its languages
