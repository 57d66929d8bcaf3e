"use strict";
// Elements, numbers in words, and answers from the server, or from this file if it carries them.

const INLINED = document.getElementById("inlined")
  ? JSON.parse(document.getElementById("inlined").textContent)
  : null;

/** An element; strings among `children` become text nodes, never markup. */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on")
      for (const [event, action] of Object.entries(value)) element.addEventListener(event, action);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

class Refused extends Error {}
class NoSession extends Refused {}

/** The answer to one question about a run. Throws `Refused` with the server's words. */
async function ask(run, what, query = {}) {
  const given = Object.entries(query).filter(
    ([, value]) => value !== "" && value !== null && value !== undefined,
  );
  const search = given
    .sort()
    .map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(value)}`)
    .join("&");
  const key = what + (search ? `?${search}` : "");
  if (INLINED) {
    if (key in INLINED.answers) return INLINED.answers[key];
    throw new Refused(
      "This is not in the file. To see it: spotlight dashboard, on the machine that has the run.",
    );
  }
  return fetched(`${runAddress(run)}/${key}`);
}

async function fetched(address) {
  let answer;
  try {
    answer = await fetch(address);
  } catch {
    throw new Refused("The dashboard's server does not answer.");
  }
  if (answer.status === 401) throw new NoSession(await answer.text());
  if (!answer.ok) throw new Refused(await answer.text());
  return answer.json();
}

/** Give JSON to the server. Throws `Refused` with its words and the answer's `status`. */
async function sent(address, content) {
  let answer;
  try {
    answer = await fetch(address, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(content),
    });
  } catch {
    throw new Refused("The dashboard's server does not answer; try again when it does.");
  }
  if (!answer.ok) throw Object.assign(new Refused(await answer.text()), { status: answer.status });
}

/** Below what the server answers about a run. */
const runAddress = (run, ...parts) => ["api/runs", ...[run, ...parts].map(encodeURIComponent)].join("/");

/** `kind`: `picture` of an evaluation, or `training`. */
function pictureAddress(run, kind, iteration, index) {
  if (INLINED) return INLINED.pictures[`${kind}/${iteration}/${index}`] ?? "";
  return runAddress(run, kind, iteration, index);
}

/** A picture that prompts are about, by its file's name. */
function referenceAddress(run, name) {
  if (INLINED) return INLINED.pictures[`reference/${name}`] ?? "";
  return runAddress(run, "reference", name);
}

/** Pictures that a prompt is about, beside its results. */
function referencesOf(addresses) {
  return h(
    "div",
    { class: "references" },
    addresses.map((src) =>
      h("figure", {}, h("img", { src, alt: "reference", loading: "lazy" }), h("figcaption", {}, "reference")),
    ),
  );
}

// -- numbers in words --

const known = (value) => typeof value === "number" && Number.isFinite(value);

function duration(seconds) {
  if (!known(seconds)) return "?";
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (number) => String(number).padStart(2, "0");
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

function dollars(usd) {
  if (!known(usd)) return "?";
  if (usd >= 1) return `$${usd.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })}`;
  return `$${usd === 0 ? "0" : Number(usd.toPrecision(2))}`;
}

const count = (number) => (known(number) ? number.toLocaleString("en") : "?");

function figure(value, digits = 4) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

const score = (value, error) =>
  known(value) ? value.toFixed(3) + (known(error) ? ` ± ${error.toFixed(3)}` : "") : "–";
const clock = (at) => (known(at) ? new Date(at * 1000).toLocaleTimeString([], { hour12: false }) : "?");
const moment = (at) => (known(at) ? new Date(at * 1000).toLocaleString([], { hour12: false }) : "?");
const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
const words = (name) => name.replaceAll("_", " ");

// -- small parts --

function card(label, value, ...notes) {
  return h(
    "div",
    { class: "card" },
    h("div", { class: "label" }, label),
    h("div", { class: "value" }, value),
    notes.map((note) => h("div", { class: "note" }, note)),
  );
}

const empty = (text) => h("p", { class: "empty" }, text);
const failed = (error) =>
  h("div", { class: "empty error", role: "alert" }, error instanceof Refused ? error.message : String(error));

const buttonOf = (content, click, attributes = {}) =>
  h("button", { type: "button", on: { click }, ...attributes }, content);

/** A box to check, of which `change` is told whether it is. */
const boxOf = (checked, change, attributes = {}) =>
  h("input", {
    type: "checkbox",
    checked,
    on: { change: (event) => change(event.target.checked) },
    ...attributes,
  });

/** A choice among `options` [value, name], of which `change` is told the value. */
const choiceOf = (options, chosen, change, attributes = {}) =>
  h(
    "select",
    { on: { change: (event) => change(event.target.value) }, ...attributes },
    options.map(([value, name]) => h("option", { value, selected: value === chosen }, name)),
  );

/** Buttons to other pages of a list. `pages`: where those after the first begin; `oldest`: where the next would. */
function pagerOf(pages, oldest, more, show) {
  const newer = () => {
    pages.pop();
    show();
  };
  const older = () => {
    pages.push(oldest);
    show();
  };
  return h(
    "div",
    { class: "controls" },
    pages.length ? buttonOf("Newer", newer) : null,
    more ? buttonOf("Older", older) : null,
  );
}

/** `items` by what `key` says of them, in their order. */
function groupedBy(items, key) {
  const groups = new Map();
  for (const item of items) groups.set(key(item), [...(groups.get(key(item)) ?? []), item]);
  return groups;
}

/** A table; a column is [title, function of a row, class]. */
function table(columns, rows, caption) {
  return h(
    "div",
    { class: "scroll" },
    h(
      "table",
      {},
      h("caption", { class: "sr" }, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          columns.map(([title, , kind]) => h("th", { class: kind ?? "", scope: "col" }, title)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            columns.map(([, cell, kind]) => h("td", { class: kind ?? "" }, cell(row))),
          ),
        ),
      ),
    ),
  );
}

const renewed = new WeakMap(); // by place: what it was last filled with, as text, and the first node of that
const keyOf = (element) =>
  `${element.tagName} ${element.dataset.key ?? element.getAttribute("href") ?? element.getAttribute("aria-label") ?? (element.tagName === "BUTTON" ? element.textContent : "")}`;

/**
 * Put other children into `place`, unless they are what it has. The focus goes to the new element with the key of the
 * old one, or else to the view, and details that were opened or closed stay so: `data-key` sets their key.
 */
function renew(place, ...children) {
  const next = h("div", {}, ...children);
  const text = INLINED || next.querySelector("canvas") ? null : new XMLSerializer().serializeToString(next);
  const last = renewed.get(place);
  if (text !== null && last?.text === text && last.first === place.firstChild) return;
  const open = new Map(
    [...place.querySelectorAll("details[data-key]")].map((details) => [keyOf(details), details.open]),
  );
  const focused =
    place !== document.activeElement && place.contains(document.activeElement)
      ? document.activeElement
      : null;
  const alike = (element) =>
    [...place.querySelectorAll(element.tagName)].filter((each) => keyOf(each) === keyOf(element));
  const number = focused && alike(focused).indexOf(focused);
  dropCharts(place);
  place.replaceChildren(...next.childNodes);
  renewed.set(place, { text, first: place.firstChild });
  for (const details of place.querySelectorAll("details[data-key]"))
    details.open = open.get(keyOf(details)) ?? details.open;
  if (focused) (alike(focused)[number] ?? document.getElementById("view")).focus({ preventScroll: true });
}

/** Fill `place` with what `make` gives, or with why it could not. */
async function fill(place, make) {
  try {
    const made = await make();
    if (made !== undefined) renew(place, made);
  } catch (error) {
    if (!(error instanceof Refused)) console.error(error);
    renew(place, failed(error));
  }
}
