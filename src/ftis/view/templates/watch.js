// Keeps the page as the records are: takes over what the server sends, and leaves alone what the reader has opened,
// chosen, scrolled or marked.
"use strict";

const main = document.getElementById("sections");
const kept = new Set(["open"]);

// Make `old` look like `now`, changing as little as possible.
function take(old, now) {
  if (old.isEqualNode(now)) return;
  for (const { name } of [...old.attributes]) {
    if (!now.hasAttribute(name) && !kept.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of now.attributes) {
    if (!kept.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const before = [...old.childNodes], after = [...now.childNodes];
  after.forEach((node, i) => {
    const known = before[i];
    if (!known) old.append(document.importNode(node, true));
    else if (known.nodeName !== node.nodeName) known.replaceWith(document.importNode(node, true));
    else if (node.nodeType === Node.ELEMENT_NODE) take(known, node);
    else if (known.nodeValue !== node.nodeValue) known.nodeValue = node.nodeValue;
  });
  before.slice(after.length).forEach((node) => node.remove());
}

// Only elements are taken from what was parsed; scripts in it never run.
function parsed(html) {
  return new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
}

function show(page) {
  document.title = page.title;
  const top = parsed(page.header);
  top.querySelector("#pulse").replaceWith(document.getElementById("pulse").cloneNode(true));
  take(document.getElementById("top"), top);
  for (const section of [...main.children]) {
    if (!page.order.includes(section.id)) section.remove();
  }
  let last = null;
  for (const anchor of page.order) {
    let section = document.getElementById(anchor);
    const html = page.sections[anchor];
    if (!section && html) {
      section = document.importNode(parsed(html), true);
      if (last) last.after(section);
      else main.prepend(section);
    } else if (section && html) {
      take(section, parsed(html));
    }
    last = section || last;
  }
  ready();
}

// A wide table is shown from its latest column.
function ready() {
  for (const table of document.querySelectorAll(".latest-right:not([data-placed])")) {
    table.dataset.placed = "";
    table.scrollLeft = table.scrollWidth;
  }
}

const stream = new EventSource(main.dataset.events);
stream.onmessage = (event) => show(JSON.parse(event.data));
function pulse(text, lost) {
  const line = document.getElementById("pulse");
  if (line.textContent !== text) line.textContent = text;
  line.classList.toggle("lost", lost);
}
stream.onopen = () => pulse("Live: the page is kept up to date.", false);
stream.onerror = () => pulse("Not connected: ftis watch has ended, or cannot be reached. Trying again.", true);
ready();
