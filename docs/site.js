"use strict";

/* What scrolls can be reached with the keyboard. */
function reach() {
  for (const box of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}

addEventListener("load", () => document.querySelector(".md-search")?.setAttribute("aria-label", "Search"));
addEventListener("load", reach);
addEventListener("resize", reach);
