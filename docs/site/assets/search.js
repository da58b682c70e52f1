// Searches the titles, headings and text of all pages (index.js) for every word that is typed.
"use strict";
const input = document.getElementById("search"), results = document.getElementById("results");
const root = new URL(".", document.currentScript.src).href;

// score ranks a page for a word: title before headings before text; 0 where the page lacks it.
function score(page, word) {
  if (page.title.toLowerCase().includes(word)) return 100;
  if (page.headings.some((h) => h.text.toLowerCase().includes(word))) return 10;
  return page.text.toLowerCase().includes(word) ? 1 : 0;
}

// excerpt returns the text around the first word that the page's text has.
function excerpt(page, words) {
  const text = page.text.toLowerCase();
  const at = Math.max(0, Math.min(...words.map((w) => text.indexOf(w)).filter((i) => i >= 0), text.length));
  return at < text.length ? "…" + page.text.slice(Math.max(0, at - 40), at + 90) + "…" : "";
}

function show() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = window.pages.map((page) => {
    const scores = words.map((w) => score(page, w));
    return { page, score: scores.includes(0) ? 0 : scores.reduce((a, b) => a + b, 0) };
  }).filter((f) => f.score > 0).sort((a, b) => b.score - a.score).slice(0, 12);
  results.replaceChildren(...found.map(({ page }) => {
    const heading = page.headings.find((h) => words.every((w) => h.text.toLowerCase().includes(w)));
    const item = document.createElement("li"), link = document.createElement("a"), text = document.createElement("small");
    link.href = root + page.url + (heading ? "#" + heading.id : "");
    link.textContent = heading ? page.title + ": " + heading.text : page.title;
    text.textContent = excerpt(page, words);
    item.append(link, text);
    return item;
  }));
  if (words.length && !found.length) results.textContent = "No page has all these words.";
  results.hidden = !words.length;
}

input.addEventListener("input", show);
input.addEventListener("keydown", (e) => {
  const first = results.querySelector("a");
  if (e.key === "Enter" && first) location.href = first.href;
  if (e.key === "Escape") { input.value = ""; show(); }
});
