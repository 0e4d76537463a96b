"use strict";
const { id, classes, points, facts } = JSON.parse(document.getElementById("data").textContent);
const KEYS = "0123456789abcdefghijklmnopqrstuvwxyz";
const STORE = `sfumato-labels-${id}`;
const at = (name) => document.getElementById(name);
const make = (tag, text = "", name = "") => Object.assign(document.createElement(tag), { textContent: text, className: name });

const place = new Map(points.map((point, position) => [String(point.index), position]));
const labels = new Array(points.length).fill(-1);
let current = 0;

/* What was kept is only believed where it fits this sheet. */
function restore() {
  labels.fill(-1);
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(STORE)) || {};
  } catch (error) {
    if (!(error instanceof SyntaxError)) warn();
  }
  for (const [index, name] of Object.entries(kept)) {
    if (place.has(index)) labels[place.get(index)] = classes.indexOf(name);
  }
}

function keep() {
  const kept = {};
  labels.forEach((label, position) => { if (label >= 0) kept[points[position].index] = classes[label]; });
  try {
    localStorage.setItem(STORE, JSON.stringify(kept));
  } catch {
    warn();
  }
}

function warn() {
  at("warning").hidden = false;
  at("warning").textContent = "This browser does not keep the labels: save labels.csv before you close or reload the page.";
}

const tiles = points.map((point, position) => {
  const tile = make("button", "", "tile");
  tile.type = "button";
  tile.append(Object.assign(make("img"), { src: point.src, alt: "", loading: "lazy" }), make("b"), make("small", point.name));
  tile.addEventListener("click", () => go(position));
  return tile;
});
at("grid").append(...tiles);

const buttons = classes.map((name, label) => {
  const button = make("button");
  button.type = "button";
  if (label < KEYS.length && KEYS[label] !== name) button.append(make("kbd", KEYS[label]));
  button.append(make("span", name), make("span", "", "count"));
  button.addEventListener("click", () => assign(label));
  return button;
});
at("classes").append(...buttons);
for (const [name, text] of facts) at("facts").append(make("dt", name), make("dd", text));

function show(position) {
  const label = labels[position], name = label < 0 ? "" : classes[label], tile = tiles[position];
  tile.classList.toggle("done", label >= 0);
  tile.querySelector("b").textContent = name;
  tile.setAttribute("aria-label", `Image ${points[position].name}, ${label < 0 ? "not labelled" : `labelled ${name}`}`);
}

function tell() {
  const counts = new Array(classes.length).fill(0);
  for (const label of labels) if (label >= 0) counts[label] += 1;
  const done = counts.reduce((a, b) => a + b, 0);
  at("left").textContent = `${done} labelled, ${points.length - done} left`;
  Object.assign(at("bar"), { value: done, max: points.length });
  buttons.forEach((button, label) => {
    button.querySelector(".count").textContent = counts[label] ? `× ${counts[label]}` : "";
    button.setAttribute("aria-pressed", labels[current] === label);
  });
}

function go(position) {
  tiles[current].removeAttribute("aria-current");
  current = Math.min(Math.max(position, 0), points.length - 1);
  tiles[current].setAttribute("aria-current", "true");
  tiles[current].scrollIntoView({ block: "nearest" });
  at("view").src = points[current].src;
  at("name").textContent = points[current].name;
  tell();
}

/* To the next one without a label, from the beginning again after the last. */
function assign(label) {
  labels[current] = label;
  show(current);
  keep();
  if (label < 0) return tell();
  for (let step = 1; step < points.length; step++) {
    const next = (current + step) % points.length;
    if (labels[next] < 0) return go(next);
  }
  go(current);
}

function below(direction) {
  const { offsetTop, offsetLeft } = tiles[current];
  for (let p = current + direction; p >= 0 && p < tiles.length; p += direction) {
    const tile = tiles[p];
    if (tile.offsetParent && tile.offsetTop !== offsetTop && tile.offsetLeft === offsetLeft) return go(p);
  }
}

function beside(direction) {
  for (let p = current + direction; p >= 0 && p < tiles.length; p += direction) {
    if (tiles[p].offsetParent) return go(p);
  }
}

const MOVES = {
  ArrowLeft: () => beside(-1), ArrowRight: () => beside(1), ArrowUp: () => below(-1), ArrowDown: () => below(1),
  Delete: () => assign(-1), Backspace: () => assign(-1),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const label = event.key.length === 1 ? KEYS.indexOf(event.key.toLowerCase()) : -1;
  if (label >= 0 && label < classes.length) assign(label);
  else if (Object.hasOwn(MOVES, event.key)) MOVES[event.key]();
  else return;
  event.preventDefault();
});

at("hide").addEventListener("change", (event) => at("grid").classList.toggle("hide", event.target.checked));
at("save").addEventListener("click", () => {
  const cell = (text) => (/[",\s]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = labels.flatMap((label, p) => (label < 0 ? [] : [`${points[p].index},${cell(classes[label])}`]));
  const file = new Blob([["index,label", ...rows, ""].join("\n")], { type: "text/csv" });
  const link = Object.assign(make("a"), { href: URL.createObjectURL(file), download: "labels.csv" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
});
window.addEventListener("storage", (event) => {  // the same sheet in another tab
  if (event.key !== STORE) return;
  restore();
  points.forEach((_, position) => show(position));
  tell();
});

history.scrollRestoration = "manual";
restore();
points.forEach((_, position) => show(position));
go(Math.max(0, labels.indexOf(-1)));
