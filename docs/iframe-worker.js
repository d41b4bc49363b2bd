// Browsers start no worker for a page that is opened as a file; there, the search works in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = () => {} // more languages of the search, which these pages do not use
      this.tell = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = new URL(url, location.href)
      this.ready = new Promise(loaded => script.onload = loaded)
      inside.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => this.tell(data))
    }
  }
}
