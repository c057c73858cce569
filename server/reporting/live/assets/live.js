"use strict";
{
  const view = document.getElementById("view"), link = document.getElementById("link"), announcement = document.getElementById("announcement");
  const LOOK_MS = 1000, LOST_MS = 3000, PATIENCE_MS = 15000;
  let shown = "";

  async function look() {
    try {
      const answer = await fetch("view" + location.search, { signal: AbortSignal.timeout(PATIENCE_MS) });
      if (!answer.ok) throw new Error(answer.status);
      show(await answer.text());
      setTimeout(look, LOOK_MS);
    } catch {
      if (link.hidden) link.querySelector("time").textContent = new Date().toLocaleTimeString();
      link.hidden = false;
      setTimeout(look, LOST_MS);
    }
  }

  function show(text) {
    link.hidden = true;
    if (text !== shown) view.innerHTML = shown = text;
    const now = view.firstElementChild.dataset;
    if (announcement.textContent !== now.announcement) announcement.textContent = now.announcement;
    document.title = now.title;
  }

  look();
}
