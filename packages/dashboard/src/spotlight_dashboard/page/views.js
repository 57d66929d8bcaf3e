"use strict";
// Every view: build(place, context) makes its parts once and returns what fills them again when the run has changed.
// The context: {run, runs, argument, go(view, argument)}.

const stateClass = {
  running: "good",
  finished: "good",
  failed: "bad",
  killed: "bad",
  stopped: "warn",
  unreadable: "bad",
  "does not answer": "bad",
};

// -- overview --

function overviewView(place, { run }) {
  const [cards, curve, spent, audit, samples, about] = Array.from({ length: 6 }, () => h("div"));
  cards.className = "cards";
  const validation = h("div", { class: "chart" });
  curve.append(validation);
  audit.append(h("h2", {}, "Audit of the ledger so far"), h("p", { class: "faint" }, "Recounting …"));
  for (const part of [curve, spent, audit, samples, about]) part.classList.add("card");
  place.replaceChildren(
    cards,
    h(
      "div",
      { class: "grid" },
      h("div", { class: "column" }, curve, samples),
      h("div", { class: "column" }, spent, audit, about),
    ),
  );
  const auditNow = () => {
    renewed.delete(audit); // its button has another text now
    return fill(audit, async () => auditOf(await ask(run, "audit", { now: 1 }), auditNow));
  };
  return async () => {
    await fill(cards, async () => {
      const found = await ask(run, "overview");
      renew(spent, h("h2", {}, "Where the worker-seconds went"), phaseBar(found.phases ?? {}, duration));
      renew(
        about,
        h("h2", {}, "Configuration"),
        table(
          [
            ["key", ([key]) => key],
            ["value", ([, value]) => h("span", { class: "words" }, value)],
          ],
          found.about,
          "Configuration",
        ),
      );
      fill(validation, () => validationChart(validation, found));
      return overviewCards(found);
    });
    fill(audit, async () => auditOf(await ask(run, "audit"), auditNow)); // may take long: the rest goes on
    await fill(samples, async () => samplesOf(await ask(run, "accounting")));
  };
}

function overviewCards(found) {
  const planned = found.planned;
  const share = planned ? Math.min(1, found.iterations / planned) : 0;
  const [first, last] = [found.validations[0], found.validations.at(-1)];
  const judged = last && known(last.strict) ? "strict" : "graded";
  const both = first !== last && known(first[judged]) && known(last[judged]);
  const gain = both ? last[judged] - first[judged] : null;
  const noise =
    gain === null ? null : Math.hypot(first[`${judged}_stderr`] ?? NaN, last[`${judged}_stderr`] ?? NaN);
  const progress = card(
    "Progress",
    `${count(found.iterations)}${planned ? ` / ${count(planned)}` : ""}`,
    h("span", { class: stateClass[found.state] ?? "" }, found.state),
    found.attempts > 1 ? `, attempt ${found.attempts}` : "",
  );
  progress.insertBefore(
    h(
      "div",
      {
        class: "meter",
        role: "progressbar",
        "aria-label": "iterations",
        "aria-valuenow": String(Math.round(share * 100)),
        "aria-valuemin": "0",
        "aria-valuemax": "100",
      },
      h("div", { style: { width: `${share * 100}%` } }),
    ),
    progress.children[2],
  );
  const running = found.state !== "finished" && found.left?.iterations;
  const nodes = found.nodes
    ? `${found.nodes.reserved} reserved, ${found.nodes.spot} spot now${found.nodes.noticed ? `, ${found.nodes.noticed} with a notice` : ""}`
    : null;
  return [
    progress,
    card(
      "Time",
      found.worked_s === undefined ? "–" : duration(found.worked_s),
      running
        ? `${duration(found.left.seconds)} left at the pace of the last 20 iterations`
        : "of work, all attempts",
      estimated(found.estimate?.work_s, duration),
      found.estimate ? `it rests on ${found.estimate.rests_on}` : null,
    ),
    card(
      "Money",
      found.usd === undefined ? "–" : dollars(found.usd),
      running ? `${dollars(found.left.usd)} to come` : "spent, lost work included",
      estimated(found.estimate?.usd, dollars),
    ),
    ...(found.target ? [targetCard(found.target)] : []),
    card(
      `Validation${last ? ` (${judged})` : ""}`,
      last ? score(last[judged], last[`${judged}_stderr`]) : "–",
      gain === null
        ? last
          ? `at iteration ${last.iteration}`
          : "no evaluation yet"
        : h(
            "span",
            { class: gain > 2 * noise ? "good" : gain < -2 * noise ? "bad" : "" },
            `${gain >= 0 ? "+" : ""}${gain.toFixed(3)} since iteration ${first.iteration}${known(noise) && noise > 0 ? `, ${(gain / noise).toFixed(1)} × its noise` : ""}`,
          ),
    ),
    card(
      "Preemptions",
      found.preemptions === undefined ? "–" : count(found.preemptions),
      found.preemptions ? `${count(found.noticed)} with notice` : "no spot node lost",
      nodes,
    ),
    card(
      "Reward of the newest groups",
      figure(found.row["rollout/reward"]),
      `loss ${figure(found.row["train/loss"])}, gradient norm ${figure(found.row["train/grad_norm"])}`,
    ),
  ];
}

/** What the whole run was expected to take before it began. */
function estimated(span, unit) {
  return span ? `estimated ${unit(span.likely)} (${unit(span.least)} to ${unit(span.most)})` : null;
}

/** What a run that holds a deadline or a budget says of the rest. */
function targetCard(target) {
  const goals = [
    target.deadline_at ? `by ${moment(target.deadline_at)}` : null,
    known(target.budget_usd) ? `for ${dollars(target.budget_usd)}` : null,
  ].filter(Boolean);
  const range = ([low, high], unit) => (known(low) && known(high) ? `${unit(low)} to ${unit(high)}` : "–");
  const held = known(target.reachable)
    ? h(
        "span",
        { class: target.reachable ? "good" : "bad" },
        target.reachable ? "within reach" : "out of reach",
      )
    : "not measured yet";
  return card(
    "Target",
    goals.join(", "),
    held,
    `the rest: ${range(target.left_s, duration)}, ${range(target.left_usd, dollars)}`,
    known(target.nodes) ? `${plural(target.nodes, "spot node")} asked for` : null,
  );
}

async function validationChart(place, found) {
  const rows = found.validations;
  await drawCurves(place, {
    title: "Validation on held-out prompts",
    xLabel: "iteration",
    yLabel: "mean score",
    curves: ["strict", "graded"].map((name) => ({
      name,
      x: rows.map((row) => row.iteration),
      y: rows.map((row) => row[name]),
      stderr: rows.map((row) => row[`${name}_stderr`] ?? 0),
    })),
    changes: found.changes.map((change) => ({ ...change, x: change.iteration })),
  });
}

function auditOf(found, again) {
  const title = h("h2", {}, "Audit of the ledger so far");
  if (INLINED) again = null;
  const button =
    again &&
    buttonOf(found.large ? "Audit now" : "Audit again", (event) => {
      event.target.disabled = true;
      event.target.textContent = "Recounting …";
      again();
    });
  if (found.running) return [title, h("p", { class: "faint" }, "Recounting …")];
  if (found.large)
    return [
      title,
      h("p", { class: "faint" }, "Ledger and checkpoint are large, so they are recounted only when asked."),
      button,
    ];
  return [
    title,
    h(
      "p",
      { class: found.ok ? "good" : "bad" },
      found.ok
        ? `✓ all ${found.checks} checks passed`
        : `✕ ${found.violations.length} of ${found.checks} checks violated`,
    ),
    found.violations.map((each) =>
      h(
        "p",
        { class: "words" },
        `${each.check}: ${each.broken} (${count(each.count)}): ${each.ids.join(", ")}`,
      ),
    ),
    h(
      "p",
      { class: "faint words" },
      `Up to record ${count(found.position)}, ${clock(found.at)}. Digest ${found.digest.slice(0, 16)}…`,
    ),
    button,
  ];
}

function samplesOf(found) {
  const parts = [
    `${count(found.trained)} trained`,
    ...Object.entries(found.dropped).map(([reason, number]) => `${count(number)} dropped (${words(reason)})`),
  ];
  if (found.in_flight) parts.push(`${count(found.in_flight)} in flight`);
  return [
    h("h2", {}, "Samples and findings"),
    h("p", {}, `${count(found.issued)} issued = ${parts.join(" + ")}`),
    h(
      "p",
      { class: "faint" },
      `${count(found.evaluated)} evaluated, ${count(found.explored)} previewed, ${count(found.rejected)} late commits refused, ${count(found.undone)} records done again.`,
    ),
    findingsOf(found.findings),
  ];
}

const findingsOf = (findings) =>
  findings.length
    ? h(
        "ul",
        { class: "findings" },
        findings.map((each) =>
          h(
            "li",
            {},
            h(
              "strong",
              { class: each.serious ? "bad" : "warn" },
              `${each.serious ? "✕" : "!"} ${each.finding}`,
            ),
            h("div", { class: "words" }, each.remedy),
          ),
        ),
      )
    : h("p", { class: "good" }, "✓ Nothing found to worry about.");

// -- curves --

const FIRST_CURVES = [
  "validation/strict",
  "validation/graded",
  "rollout/reward",
  "train/loss",
  "train/grad_norm",
  "advantage/silent_groups_share",
];
const AXIS_NAMES = {
  iteration: "iteration",
  samples: "samples trained",
  hours: "hours of work",
  usd: "dollars spent",
};
const curveChoice = {
  axis: "iteration",
  smoothing: 0,
  others: new Set(),
  means: false,
  chosen: null,
  filter: "",
};

/** Where along an axis the configuration changed; `run` is told where there are several. */
const changesOf = ({ changes }, axis, run) => changes.map((change) => ({ ...change, x: change[axis], run }));

function curvesView(place, { run, runs }) {
  const choice = curveChoice;
  const charts = h("div", { class: "grid" });
  const list = h("div", { class: "metrics" });
  const shown = new Map();
  let names = [];
  const axis = choiceOf(Object.entries(AXIS_NAMES), choice.axis, (value) => {
    choice.axis = value;
    refresh();
  });
  const smoothing = h("input", {
    type: "range",
    min: "0",
    max: "0.98",
    step: "0.02",
    value: String(choice.smoothing),
    style: { width: "120px" },
    on: {
      input: (event) => {
        choice.smoothing = Number(event.target.value);
        refresh();
      },
    },
  });
  const filter = h("input", {
    type: "search",
    placeholder: "filter metrics",
    value: choice.filter,
    on: {
      input: (event) => {
        choice.filter = event.target.value;
        listNames();
      },
    },
  });
  const means = boxOf(choice.means, (checked) => {
    choice.means = checked;
    refresh();
  });
  const membership = (names, name, attributes) =>
    boxOf(
      names.has(name),
      (checked) => {
        names[checked ? "add" : "delete"](name);
        refresh();
      },
      attributes,
    );
  const others = runs
    .filter((each) => each.name !== run)
    .slice(0, 30)
    .map((each) =>
      h("label", {}, membership(choice.others, each.name), h("span", { class: "words" }, each.name)),
    );
  place.replaceChildren(
    h(
      "div",
      { class: "controls" },
      h("label", {}, "Per", axis),
      h("label", {}, "Smoothing", smoothing),
      others.length ? h("span", { class: "faint" }, "with") : null,
      others,
      others.length ? h("label", {}, means, "means over seeds") : null,
    ),
    h(
      "details",
      { open: window.innerWidth > 700 },
      h("summary", {}, "Metrics"),
      h("div", { class: "controls" }, filter),
      list,
    ),
    charts,
  );

  function listNames() {
    const matching = names.filter(({ name }) => name.toLowerCase().includes(choice.filter.toLowerCase()));
    renew(
      list,
      ...matching
        .slice(0, 400)
        .map(({ name, last }) =>
          h(
            "label",
            {},
            membership(choice.chosen, name, { "data-key": name }),
            h("span", {}, `${name} `, h("span", { class: "faint" }, figure(last))),
          ),
        ),
    );
    if (!matching.length)
      renew(
        list,
        h("span", { class: "faint" }, names.length ? "No metric of that name." : "No metrics yet."),
      );
  }

  async function drawOne(name) {
    if (!shown.has(name)) {
      const chart = h("div", { class: "chart" });
      const note = h("div", { class: "faint" });
      shown.set(name, { chart, note, whole: h("div", { class: "card" }, chart, note) });
    }
    const { chart, note, whole } = shown.get(name);
    if (whole.parentNode !== charts) charts.append(whole);
    await fill(note, async () => {
      const together = [
        run,
        ...[...choice.others].filter((other) => other !== run && runs.some((each) => each.name === other)),
      ];
      if (choice.means && together.length > 1) return drawMeans(chart, name, together);
      const found = await Promise.all(together.map((each) => ask(each, "curve", { name })));
      await drawTogether(
        chart,
        name,
        found.map((each, index) => ({ ...each, name: together[index], x: each[choice.axis] })),
        found.flatMap((each, index) => changesOf(each, choice.axis, found[1] && together[index])),
      );
      const thinned = found.filter((each) => each.points > each.y.length);
      return thinned.length
        ? `${count(thinned[0].y.length)} of ${count(thinned[0].points)} points: the least and greatest of each stretch.`
        : "";
    });
  }

  const drawTogether = (chart, title, curves, changes) =>
    drawCurves(chart, {
      title,
      xLabel: AXIS_NAMES[choice.axis],
      curves: curves.map(({ name, x, y, stderr }, index) => ({
        name,
        x,
        y: smoothed(y, choice.smoothing),
        stderr: choice.smoothing ? null : stderr,
        dash: DASHES[index % DASHES.length],
      })),
      changes,
    });

  async function drawMeans(chart, name, together) {
    const query = [["name", name], ["axis", choice.axis], ...together.map((each) => ["run", each])];
    const { groups } = await fetched(`api/means?${new URLSearchParams(query)}`);
    const curves = groups.map((each) => ({ ...each, stderr: each.half }));
    await drawTogether(
      chart,
      name,
      curves,
      groups.flatMap((each) => each.changes),
    );
    const several = groups.filter((each) => each.runs.length > 1);
    const repeated = groups.flatMap((each) => each.repeated_seeds);
    return several.length
      ? `Means and 90 % intervals over the seeds of a configuration: ${several.map((each) => each.runs.join(", ")).join("; ")}.` +
          (repeated.length ? ` Too narrow, as of the same run_seed as another: ${repeated.join(", ")}.` : "")
      : "No two of these runs are seeds of one configuration.";
  }

  async function refresh() {
    try {
      const found = await ask(run, "metrics");
      names = found.names;
      choice.chosen ??= new Set(FIRST_CURVES);
      listNames();
      const chosen = names.map(({ name }) => name).filter((name) => choice.chosen.has(name));
      chosen.sort((a, b) => (FIRST_CURVES.indexOf(a) + 1 || 99) - (FIRST_CURVES.indexOf(b) + 1 || 99));
      for (const [name, { whole }] of shown)
        if (!chosen.includes(name)) {
          dropCharts(whole);
          whole.remove();
          shown.delete(name);
        }
      if (!chosen.length)
        renew(
          charts,
          empty(
            names.length
              ? "Choose metrics above."
              : "No metrics yet: the first row comes with the first evaluation or iteration.",
          ),
        );
      else for (const stale of charts.querySelectorAll(":scope > .empty")) stale.remove();
      await Promise.all(chosen.map(drawOne));
    } catch (error) {
      renew(charts, failed(error));
      shown.clear();
    }
  }
  return refresh;
}

// -- cluster --

const SPANS = [
  ["600", "last 10 minutes"],
  ["3600", "last hour"],
  ["21600", "last 6 hours"],
  ["86400", "last day"],
  ["", "whole run"],
];
const clusterChoice = { span: "", page: 0 };

function clusterView(place, { run }) {
  const choice = clusterChoice;
  const drawn = h("div", { class: "card wide" });
  const selection = {};
  const [price, paid] = [
    h("div", { class: "chart", style: { minHeight: "220px" } }),
    h("p", { class: "faint" }),
  ];
  const pages = h("span");
  const happened = h("div", { class: "card" });
  const span = choiceOf(
    SPANS,
    choice.span,
    (value) => {
      Object.assign(choice, { span: value, page: 0 });
      refresh();
    },
    { disabled: Boolean(INLINED) },
  );
  place.replaceChildren(
    h("div", { class: "controls" }, h("label", {}, "Show", span), pages),
    h("div", { class: "grid" }, drawn, h("div", { class: "card wide" }, price, paid), happened),
  );

  async function refresh() {
    await fill(drawn, async () => {
      const found = await ask(
        run,
        "cluster",
        INLINED ? {} : { last_s: choice.span, page: choice.page || "" },
      );
      if (!found.lanes.length) return empty("No worker has joined yet.");
      const last = Math.ceil(found.total / found.page_size) - 1;
      const turn = (by) =>
        buttonOf(
          by < 0 ? "Newer" : "Older",
          () => {
            choice.page += by;
            refresh();
          },
          { disabled: Boolean(INLINED) || choice.page + by < 0 || choice.page + by > last },
        );
      renew(
        pages,
        `${plural(found.total, "lane")}${last ? `, page ${found.page + 1} of ${last + 1} ` : ""}`,
        ...(last ? [turn(-1), turn(1)] : []),
      );
      paid.textContent = priceText(found.prices);
      fill(price, () => pricesOf(price, found));
      renew(happened, h("h2", {}, "Newest incidents"), incidentTable(found.events.slice(-15).reverse()));
      return [
        h("h2", {}, "Workers: a lane each, coloured by phase"),
        laneLegend(found),
        lanesOf(found, selection),
      ];
    });
  }
  return refresh;
}

function laneLegend(found) {
  const happened = new Set(found.events.map((event) => event.kind));
  const met = new Set(found.lanes.flatMap((lane) => lane.stretches.map(([, , phase]) => phase)));
  return h(
    "div",
    { class: "legend" },
    found.phases.map((phase, index) => met.has(index) && swatchOf(phase, words(phase))),
    ["node_noticed", "node_drained", "node_lost", "worker_crashed"].map((kind) =>
      h("span", {}, `${MARKS[kind]} ${words(kind)}`),
    ),
    ["learner_lost", "learner_waits", "learner_placed", "on_demand", "node_returned"].map(
      (kind) => happened.has(kind) && h("span", {}, `${MARKS[kind]} ${words(kind)}`),
    ),
  );
}

/** A time as Plotly takes it: on this machine's clock, like the lanes. */
const localTime = (at) =>
  new Date(at * 1000 - new Date(at * 1000).getTimezoneOffset() * 60000).toISOString().slice(0, 23);

async function pricesOf(place, found) {
  const curves = Object.entries(found.prices)
    .filter(([, steps]) => steps.length)
    .map(([name, steps], index) => ({
      name: `${name} worker`,
      steps: true,
      dash: DASHES[index],
      // A price holds until the next one: also where that is a gap, before which a line of one point has no end.
      x: steps.flatMap(([at], index) => [at, steps[index + 1]?.[0] ?? found.end]).map(localTime),
      y: steps.flatMap(([, price]) => [price, price]),
    }));
  await drawCurves(place, {
    title: "Price of a worker over time",
    xLabel: "",
    yLabel: "USD an hour",
    curves,
    height: 220,
    xRange: [localTime(found.start), localTime(found.end)],
  });
}

/** What is known of prices, also where a line says little. */
function priceText(prices) {
  const sentences = Object.entries(prices).map(([kind, steps]) => {
    const met = steps.map(([, price]) => price).filter(known);
    if (!met.length)
      return kind === "spot" ? "No spot worker was there in this time: no spot price is known." : null;
    const [least, most] = [Math.min(...met), Math.max(...met)];
    const name = `A ${kind} worker costs`;
    const always = met.length === steps.length ? " throughout" : "";
    return least === most
      ? `${name} ${dollars(least)} an hour${always}.`
      : `${name} ${dollars(least)} to ${dollars(most)} an hour, ${dollars(met.at(-1))} last.`;
  });
  return [
    ...sentences,
    "The newest worker's price, which is that at which its node joined; gaps are without workers.",
  ]
    .filter(Boolean)
    .join(" ");
}

const incidentTable = (incidents) =>
  incidents.length
    ? table(
        [
          ["when", (each) => moment(each.at), "time"],
          ["what", (each) => `${MARKS[each.kind] ?? "●"} ${words(each.kind)}`],
          ["where", (each) => `${each.subject}${each.spot ? " (spot)" : ""}`],
          ["detail", (each) => h("span", { class: "words" }, each.detail)],
        ],
        incidents,
        "Incidents",
      )
    : empty("No incidents: nodes neither joined nor left.");

// -- money --

function moneyView(place, { run }) {
  const [cards, phases, nodes] = [
    h("div", { class: "cards" }),
    h("div", { class: "card" }),
    h("div", { class: "card" }),
  ];
  const curve = h("div", { class: "chart" });
  place.replaceChildren(
    cards,
    h(
      "div",
      { class: "grid" },
      h("div", { class: "column" }, phases),
      h("div", { class: "column" }, h("div", { class: "card" }, curve), nodes),
    ),
  );
  return () =>
    fill(cards, async () => {
      const found = await ask(run, "money");
      if (!found.worker_s) {
        renew(phases, empty("Nothing billed yet."));
        return [];
      }
      const ahead = found.forecast;
      renew(
        phases,
        h("h2", {}, "By phase"),
        phaseBar(Object.fromEntries(found.phases.map((each) => [each.phase, each.usd])), dollars),
        table(
          [
            ["phase", (each) => words(each.phase)],
            ["worker-seconds", (each) => count(Math.round(each.seconds)), "number"],
            ["USD", (each) => dollars(each.usd), "number"],
          ],
          found.phases,
          "By phase",
        ),
      );
      renew(
        nodes,
        h("h2", {}, "By node"),
        table(
          [
            ["node", (each) => each.node],
            ["", (each) => (each.spot === null ? "" : each.spot ? "spot" : "reserved")],
            ["worker-seconds", (each) => count(Math.round(each.seconds)), "number"],
            ["USD", (each) => dollars(each.usd), "number"],
          ],
          found.nodes,
          "By node",
        ),
      );
      fill(curve, () =>
        drawCurves(curve, {
          title: "Dollars by iteration",
          xLabel: "iteration",
          yLabel: "USD so far",
          curves: [{ name: run, x: found.curve.iteration, y: found.curve.usd }],
        }),
      );
      const saved =
        known(found.on_demand_usd) && found.on_demand_usd > 0 ? 1 - found.usd / found.on_demand_usd : null;
      return [
        card(
          "Spent",
          dollars(found.usd),
          `${count(Math.round(found.worker_s))} worker-seconds, ${count(Math.round(found.lost_s))} of them lost`,
        ),
        card("On spot nodes", dollars(found.spot_usd), plural(found.spot_nodes, "spot node")),
        card(
          "The same work on demand",
          known(found.on_demand_usd) ? dollars(found.on_demand_usd) : "–",
          known(found.on_demand_usd)
            ? `the measured worker-seconds that were not lost, at ${dollars(found.on_demand_usd_h)} an hour (fleet.price_usd_h)`
            : "fleet.price_usd_h is not set",
          saved === null
            ? ""
            : h(
                "span",
                { class: saved > 0 ? "good" : "" },
                saved >= 0
                  ? `${(100 * saved).toFixed(0)} % saved`
                  : `${(-100 * saved).toFixed(0)} % more, for what was lost`,
              ),
        ),
        card(
          "Forecast",
          known(ahead.usd_left) ? dollars(found.usd + ahead.usd_left) : "–",
          known(ahead.usd_left)
            ? `at the end: ${plural(ahead.iterations_left, "iteration")} left at ${dollars(ahead.usd_per_iteration)} each, the mean of the last ${ahead.over_iterations}`
            : "needs two iterations",
        ),
      ];
    });
}

// -- exploration and pipeline --

const EXPLORED = [
  ["exploration/", "Exploration"],
  ["pipeline/", "Overlap"],
  ["replay/", "Rounding between rollout and replay"],
];

function explorationView(place, { run }) {
  const [filled, charts] = [h("div", { class: "card" }), h("div", { class: "grid" })];
  place.replaceChildren(filled, h("div", { style: { height: "14px" } }), charts);
  const shown = new Map();
  return async () => {
    await fill(filled, async () => {
      const found = await ask(run, "accounting");
      const parts = Object.entries(found.filled_s);
      return [
        h("h2", {}, "What filled time in which GPUs would have waited"),
        parts.length
          ? table(
              [
                ["filled by", ([name]) => name],
                ["worker-seconds", ([, seconds]) => count(Math.round(seconds)), "number"],
              ],
              parts,
              "Fillers",
            )
          : empty(
              "Nothing: neither exploration in idle time nor overlap (exploration, pipeline.axis) is on.",
            ),
      ];
    });
    try {
      const { names } = await ask(run, "metrics");
      const wanted = names
        .map(({ name }) => name)
        .filter((name) => EXPLORED.some(([prefix]) => name.startsWith(prefix)))
        .slice(0, 24);
      if (!wanted.length)
        return renew(charts, empty("This run records no contrast or fidelity: exploration is off."));
      if (!shown.size) charts.replaceChildren();
      await Promise.all(
        wanted.map(async (name) => {
          if (!shown.has(name)) {
            shown.set(name, h("div", { class: "chart" }));
            charts.append(h("div", { class: "card" }, shown.get(name)));
          }
          const found = await ask(run, "curve", { name });
          await drawCurves(shown.get(name), {
            title: name,
            xLabel: "iteration",
            curves: [{ name, x: found.iteration, y: found.y, stderr: found.stderr }],
            changes: changesOf(found, "iteration"),
            height: 220,
          });
        }),
      );
    } catch (error) {
      renew(charts, failed(error));
      shown.clear();
    }
  };
}

// -- samples --

function samplesView(place, { run, argument, go }) {
  const results = h("div", { class: "card" });
  const detail = h("div", { class: "card", hidden: true });
  const choose = (name, values) =>
    h(
      "select",
      { name },
      values.map((value) => h("option", { value }, value || `any ${name}`)),
    );
  let pages = [];
  const form = h(
    "form",
    {
      class: "controls",
      on: {
        submit: (event) => {
          event.preventDefault();
          pages = [];
          search();
        },
      },
    },
    h("input", {
      type: "search",
      name: "text",
      placeholder: "prompt or rollout id",
      "aria-label": "prompt or rollout id",
    }),
    choose("purpose", ["", "train", "eval", "explore"]),
    choose("fate", ["", "trained", "evaluated", "explored", "dropped", "in flight"]),
    h("input", {
      type: "number",
      name: "iteration",
      min: "0",
      placeholder: "iteration",
      "aria-label": "iteration",
      style: { width: "110px" },
    }),
    h("input", {
      type: "text",
      name: "worker",
      placeholder: "worker or node",
      "aria-label": "worker or node",
      style: { width: "130px" },
    }),
    h("label", {}, h("input", { type: "checkbox", name: "moved", value: "1" }), "on several nodes"),
    h("button", { type: "submit" }, "Search"),
  );
  place.replaceChildren(detail, INLINED ? "" : form, results);

  const listed = (samples, title) =>
    table(
      [
        ["rollout", (each) => h("a", { href: go.address("samples", each.id) }, each.id)],
        ["for", (each) => each.purpose],
        ["iteration", (each) => count(each.iteration), "number"],
        [
          "prompt",
          (each) =>
            h(
              "span",
              { class: "words clamp", dir: "auto", title: each.text.slice(0, 500) },
              each.text.slice(0, 400),
            ),
        ],
        ["reward", (each) => figure(each.reward), "number"],
        ["nodes", (each) => h("span", { class: "words" }, each.nodes.join(" → ") || "–")],
        ["fate", (each) => (each.kind ?? "in flight") + (each.reason ? ` (${words(each.reason)})` : "")],
      ],
      samples,
      title,
    );
  const search = () =>
    fill(results, async () => {
      if (INLINED) {
        const [moved, newest] = [await ask(run, "samples", { moved: "1" }), await ask(run, "samples")];
        return [
          moved.samples.length
            ? [
                h("h2", {}, "Samples that were on several nodes, the newest"),
                listed(moved.samples, "Samples on several nodes"),
              ]
            : null,
          h("h2", {}, "The newest samples"),
          newest.samples.length ? listed(newest.samples, "Newest samples") : empty("None yet."),
          h(
            "p",
            { class: "faint" },
            "The lives of these are in the file; search and all others need the dashboard itself.",
          ),
        ];
      }
      const found = await ask(run, "samples", {
        ...Object.fromEntries(new FormData(form)),
        before: pages.at(-1) ?? "",
      });
      if (!found.samples.length) return empty("No sample matches.");
      return [listed(found.samples, "Samples"), pagerOf(pages, found.samples.at(-1).seq, found.more, search)];
    });
  return async () => {
    detail.hidden = !argument;
    await Promise.all([
      argument ? fill(detail, async () => lifeOf(await ask(run, "sample", { id: argument }), go)) : null,
      search(),
    ]);
  };
}

function lifeOf(found, go) {
  const isHere = (id) => !INLINED || `sample?id=${encodeURIComponent(id)}` in INLINED.answers;
  return [
    h("h2", {}, `${found.id}, a sample of iteration ${found.iteration} for ${found.purpose}`),
    h("p", { class: "words", dir: "auto" }, found.prompt.slice(0, 20000)),
    h(
      "p",
      { class: "faint words" },
      `Member ${found.member}, ${found.steps} steps, seed ${found.seed}. Metadata: ${JSON.stringify(found.metadata)}`,
    ),
    h(
      "div",
      { class: "grid" },
      h(
        "div",
        { class: "column" },
        h("div", {}, h("h2", {}, "Where it was"), staysOf(found)),
        h(
          "div",
          {},
          h("h2", {}, "Life"),
          table(
            [
              ["record", (each) => count(each.seq), "number"],
              ["what", (each) => words(each.what)],
              ["how", (each) => h("span", { class: "words" }, each.detail)],
              ["billed by", (each) => (each.by ? clock(each.by) : "not yet"), "time"],
            ],
            found.life,
            "Life",
          ),
          h(
            "p",
            { class: "faint" },
            "Records have no time of their own: “billed by” is the end of the next bill.",
          ),
        ),
      ),
      h(
        "div",
        { class: "column" },
        h(
          "div",
          {},
          h("h2", {}, "Its scores"),
          table(
            [
              ["score", (each) => each.name],
              ["value", (each) => figure(each.value), "number"],
              ["by", (each) => h("span", { class: "words" }, each.by ?? "")],
            ],
            found.scores,
            "Scores",
          ),
        ),
        h(
          "div",
          {},
          h("h2", {}, `Its group, best first (${found.group.length})`),
          table(
            [
              [
                "rollout",
                (each) =>
                  isHere(each.id) ? h("a", { href: go.address("samples", each.id) }, each.id) : each.id,
              ],
              ["reward", (each) => figure(each.reward), "number"],
              ["fate", (each) => each.kind ?? "in flight"],
            ],
            found.group.slice(0, 64),
            "Group",
          ),
        ),
      ),
    ),
  ];
}

/** Every worker that had the sample, and what became of it there. */
function staysOf(found) {
  if (!found.stays?.length) {
    return h(
      "p",
      { class: "faint" },
      found.stays && !found.life.some((each) => each.what === "finished")
        ? "It was given to no worker yet."
        : "This run was made before leases were recorded: its ledger knows only the worker that finished a sample.",
    );
  }
  const became = (each) =>
    each.made_it
      ? "finished here"
      : each.then.map(({ what, at }) => `${words(what)} ${clock(at)}`).join(", ") || "not finished";
  return table(
    [
      ["given", (each) => moment(each.at), "time"],
      ["worker", (each) => each.worker],
      ["from step", (each) => `${each.from_step} of ${found.steps}`, "number"],
      ["what became of it", became],
      ["lease", (each) => `${each.lease} of attempt ${each.attempt}`],
    ],
    found.stays,
    "Where it was",
  );
}

// -- log and doctor --

function logView(place, { run }) {
  const [found, attempts, incidents, drops] = Array.from({ length: 4 }, () => h("div", { class: "card" }));
  const [names, tail] = [h("select", { "aria-label": "log file" }), h("pre", { tabindex: "0" }, "…")];
  let pages = [];
  names.addEventListener("change", () => readTail());
  place.replaceChildren(
    h(
      "div",
      { class: "grid" },
      h("div", { class: "column" }, found, drops),
      h(
        "div",
        { class: "column" },
        attempts,
        h("div", { class: "card" }, h("h2", {}, "Logs of processes"), names, tail),
      ),
      h("div", { class: "wide" }, incidents),
    ),
  );
  const readTail = () =>
    fill(tail, async () => {
      if (!names.value) return "No logs yet.";
      const log = await ask(run, "logfile", { name: names.value });
      const atEnd = tail.scrollTop + tail.clientHeight >= tail.scrollHeight - 20;
      setTimeout(() => {
        if (atEnd) tail.scrollTop = tail.scrollHeight;
      });
      return `${log.cut ? "…\n" : ""}${log.text || "(empty)"}`;
    });
  const readLog = () =>
    fill(incidents, async () => {
      const log = await ask(run, "log", { before: pages.at(-1) ?? "" });
      const chosen = names.value;
      renew(names, ...log.logs.map((name) => h("option", { value: name, selected: name === chosen }, name)));
      renew(
        attempts,
        h("h2", {}, "Attempts"),
        log.attempts.length
          ? table(
              [
                ["no.", (each) => each.number, "number"],
                ["on", (each) => h("span", { class: "words" }, each.host)],
                ["from", (each) => moment(each.started_at), "time"],
                ["to", (each) => moment(each.seen_at), "time"],
                ["ended", (each) => each.ended],
              ],
              log.attempts,
              "Attempts",
            )
          : empty("None yet."),
        log.rollbacks.map((each) =>
          h(
            "p",
            { class: "faint" },
            `Attempt ${each.attempt} undid records ${count(each.to + 1)} to ${count(each.from)}.`,
          ),
        ),
      );
      renew(
        drops,
        h("h2", {}, "Dropped samples"),
        log.drops.length
          ? table(
              [
                ["for", (each) => each.purpose],
                ["reason", (each) => words(each.reason)],
                ["count", (each) => count(each.count), "number"],
                [
                  "an example",
                  (each) => h("span", { class: "words clamp" }, `${each.example}: ${each.detail}`),
                ],
              ],
              log.drops,
              "Drops",
            )
          : empty("None."),
      );
      return [
        h("h2", {}, "Incidents"),
        incidentTable(log.incidents),
        INLINED ? "" : pagerOf(pages, log.incidents.at(-1)?.id, log.more, readLog),
      ];
    });
  return async () => {
    await Promise.all([
      fill(found, async () => [
        h("h2", {}, "Findings and remedies"),
        findingsOf((await ask(run, "accounting")).findings),
        h("p", { class: "faint" }, "The machine itself is checked by spotlight doctor."),
      ]),
      readLog(),
    ]);
    await readTail();
  };
}
