"use strict";
{
  const view = document.getElementById("view"), link = document.getElementById("link"), said = document.getElementById("said");
  const PATIENCE_MS = 25000, PAUSE_MS = 3000;
  let source, silence;

  function listen() {
    source = new EventSource("events" + location.search);
    source.addEventListener("view", (event) => { view.innerHTML = event.data; heard(); });
    source.addEventListener("alive", heard);
    source.onerror = lost;
  }

  function heard() {
    link.hidden = true;
    clearTimeout(silence);
    silence = setTimeout(lost, PATIENCE_MS);
    const now = view.firstElementChild.dataset;
    if (said.textContent !== now.said) said.textContent = now.said;
    document.title = now.title;
  }

  function lost() {
    source.close();
    clearTimeout(silence);
    if (link.hidden) link.querySelector("time").textContent = new Date().toLocaleTimeString();
    link.hidden = false;
    silence = setTimeout(listen, PAUSE_MS);
  }

  listen();
}
