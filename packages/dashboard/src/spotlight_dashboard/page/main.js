"use strict";
// Which run and which view, and what the server reports of changes. The address: #/RUN/VIEW/ARGUMENT.

const VIEWS = [
  ["overview", "Overview", overviewView],
  ["pictures", "Pictures", picturesView],
  ["curves", "Curves", curvesView],
  ["cluster", "Cluster", clusterView],
  ["money", "Money", moneyView],
  ["exploration", "Exploration", explorationView],
  ["samples", "Samples", samplesView],
  ["log", "Log", logView],
  ["votes", "Votes", votesView],
];
const REFRESH_MS = 2500;
const RECONNECT_MS = 5000;

let runs = [];
let here = { run: null, view: "overview", argument: "" };
let refresh = null;
let due = false;
let busy = null;

const place = document.getElementById("view");
const choice = document.getElementById("run");
const tabs = document.getElementById("tabs");
const connection = document.getElementById("connection");

const address = (run, view, argument = "") =>
  `#/${encodeURIComponent(run)}/${view}${argument ? `/${encodeURIComponent(argument)}` : ""}`;

function readAddress() {
  const [run, view, argument] = location.hash
    .replace(/^#\/?/, "")
    .split("/")
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return "";
      }
    });
  const isRun = (name) => runs.some((each) => each.name === name);
  return {
    run: [run, here.run, runs[0]?.name].find(isRun) ?? null,
    view: VIEWS.some(([name]) => name === view) ? view : "overview",
    argument: argument ?? "",
  };
}

const tabLinks = VIEWS.map(([, title], index) => h("a", { title: `Key ${index + 1}` }, title));
tabs.append(...tabLinks);

function drawTabs() {
  const asks = !INLINED && runs.find((each) => each.name === here.run)?.asks_people;
  VIEWS.forEach(([name], index) => {
    const link = tabLinks[index];
    link.href = address(here.run ?? "", name);
    link.hidden = name === "votes" && !asks;
    if (name === here.view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
}

function drawChoice() {
  renew(
    choice,
    runs.map((each) => h("option", { value: each.name }, `${each.name} – ${each.state}`)),
  );
  if (choice.value !== here.run) choice.value = here.run ?? "";
}

function show() {
  const wanted = readAddress();
  if (wanted.run !== here.run) Object.assign(clusterChoice, { page: 0 });
  here = wanted;
  drawChoice();
  drawTabs();
  document.title = here.run ? `${here.run}: ${here.view} – Spotlight` : "Spotlight";
  dropCharts(place);
  refresh = null;
  if (!here.run)
    return place.replaceChildren(
      empty(
        `There are no runs in ${places.join(", ") || "the given folder"} yet. Start one: spotlight train`,
      ),
    );
  const go = { address: (view, argument) => address(here.run, view, argument) };
  const build = VIEWS.find(([name]) => name === here.view)[2];
  place.replaceChildren(h("p", { class: "empty" }, "Reading …"));
  refresh = build(place, { run: here.run, runs, argument: here.argument, go });
  update();
}

/** Fill the view again, never twice at once; a view that was left does not hold up the next. */
async function update() {
  if (!refresh || busy === refresh) {
    due = true;
    return;
  }
  const mine = refresh;
  [busy, due] = [mine, false];
  try {
    await mine();
  } finally {
    if (busy === mine) {
      busy = null;
      if (due) update();
    }
  }
}

let places = [];
let plotlyVersion = "";
async function readRuns() {
  const found = INLINED ? { runs: [INLINED.run], places: [], plotly: "" } : await fetched("api/runs");
  [runs, places, plotlyVersion] = [found.runs, found.places, found.plotly];
  drawChoice();
}

/** What asks for `action`: it is done at most every REFRESH_MS, and not while nobody sees the page. */
function paced(action) {
  let last = 0;
  let timer = null;
  let missed = false;
  const soon = () => {
    if (document.hidden) {
      missed = true;
      return;
    }
    timer ??= setTimeout(
      () => {
        timer = null;
        last = Date.now();
        action();
      },
      Math.max(0, last + REFRESH_MS - Date.now()),
    );
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && missed) {
      missed = false;
      soon();
    }
  });
  return soon;
}

function follow() {
  let lost = false;
  const updateSoon = paced(update);
  const readRunsSoon = paced(() => readRuns().catch(() => {}));
  const status = (text, isLost) => {
    connection.textContent = text;
    connection.classList.toggle("lost", isLost);
  };
  const listen = () => {
    const source = new EventSource("api/changes");
    source.addEventListener("open", () => {
      status("live", false);
      if (lost) {
        lost = false;
        readRunsSoon();
        updateSoon();
      }
    });
    source.addEventListener("error", () => {
      lost = true;
      status("connection lost, trying again", true);
      if (source.readyState !== EventSource.CLOSED) return;
      // An answer other than 200, at which the browser gives up: a server that starts, or another one.
      const again = () => setTimeout(listen, RECONNECT_MS);
      readRuns().then(again, (error) => (error instanceof NoSession ? askToken(error) : again()));
    });
    source.addEventListener("runs", async () => {
      await readRuns().catch(() => {});
      if (readAddress().run !== here.run) show(); // the address may name a run that is yet to come
    });
    source.addEventListener("changed", (event) => {
      readRunsSoon();
      if (
        JSON.parse(event.data).names.includes(here.run) ||
        (here.view === "curves" && curveChoice.others.size)
      )
        updateSoon();
    });
  };
  listen();
  setInterval(() => {
    readRunsSoon();
    updateSoon();
  }, 60000); // a process that was killed writes nothing
}

// -- who may ask --

/** A session for the token in the address, which goes from there and from the browser's history. */
async function enter() {
  const query = new URLSearchParams(location.search);
  const token = query.get("token");
  if (token === null) return;
  query.delete("token");
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}${location.hash}`);
  await sent("api/session", { token }).catch(() => {}); // used before, by this browser perhaps
}

/** Ask for a token in place of the view. */
function askToken(error) {
  const token = h("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const said = h("span", { role: "alert" });
  const give = async (event) => {
    event.preventDefault();
    try {
      await sent("api/session", { token: token.value.trim() });
      location.reload();
    } catch (refused) {
      said.textContent = refused.message;
    }
  };
  refresh = null;
  place.replaceChildren(
    h(
      "form",
      { class: "empty", on: { submit: give } },
      h("p", {}, `This browser may not see the runs: ${error.message}.`),
      h("label", {}, "Token ", token),
      h("button", { type: "submit" }, "Open"),
      said,
    ),
  );
  token.focus();
}

// -- light and dark, keys, start --

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = theme === "dark" ? "☀ Light" : "☾ Dark";
  try {
    localStorage.setItem("spotlight-theme", theme);
  } catch {
    /* a browser without storage: asked again next time */
  }
}
function firstTheme() {
  try {
    if (localStorage.getItem("spotlight-theme")) return localStorage.getItem("spotlight-theme");
  } catch {
    /* as above */
  }
  return window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}
document.getElementById("theme").addEventListener("click", () => {
  setTheme(isDark() ? "light" : "dark");
  if (refresh) show();
});
setTheme(firstTheme());

document.addEventListener("keydown", (event) => {
  if (
    event.ctrlKey ||
    event.altKey ||
    event.metaKey ||
    event.target.closest("input, select, textarea, dialog") ||
    document.querySelector(".ballot") // where digits choose pictures
  )
    return;
  const view = VIEWS[Number(event.key) - 1];
  if (view && here.run) location.hash = address(here.run, view[0]);
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  place.focus();
}); // its address would be a run's
choice.addEventListener("change", () => {
  location.hash = address(choice.value, here.view);
});
window.addEventListener("hashchange", show);

(async () => {
  try {
    if (!INLINED) await enter();
    await readRuns();
    show();
    if (!INLINED) follow();
    else connection.textContent = `as of ${moment(INLINED.made_at)}`;
  } catch (error) {
    if (error instanceof NoSession) return askToken(error);
    place.replaceChildren(failed(error));
    if (!INLINED) setTimeout(() => location.reload(), 5000);
  }
})();
