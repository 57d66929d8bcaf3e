"use strict";
// Charts by Plotly, loaded when the first is drawn, and lanes of phases on canvas.

// Okabe and Ito's palette, and greys: told apart with every common colour vision.
const PHASE_COLOURS = {
  rollout: "#56b4e9",
  training: "#0072b2",
  evaluation: "#009e73",
  exploration: "#f0e442",
  reward: "#cc79a7",
  weight_sync: "#e69f00",
  checkpoint: "#8c6d31",
  reconfiguration: "#7f5fa8",
  setup: "#8f9aa6",
  idle: "#d3d6da",
  lost: "#d55e00",
};
const DARK_PHASE_COLOURS = { ...PHASE_COLOURS, training: "#2f8fd0", idle: "#454c55", setup: "#78828d" };
const LINES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07700", "#2a93cf", "#7f5fa8", "#5f656d"];
const DARK_LINES = ["#62b6f0", "#ff9254", "#3cc796", "#e8a2c8", "#e9b949", "#9adcff", "#b79be0", "#a3abb5"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];

const isDark = () => document.documentElement.dataset.theme === "dark";
const phaseColour = (phase) => (isDark() ? DARK_PHASE_COLOURS : PHASE_COLOURS)[phase] ?? "#888";
const lineColour = (index) => (isDark() ? DARK_LINES : LINES)[index % LINES.length];
const inColour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let plotly = null;
/** Plotly, once it is there. */
function loadPlotly() {
  plotly ??= new Promise((done, failedToLoad) => {
    if (window.Plotly) return done(window.Plotly);
    const script = h("script", { src: `page/plotly.min.js?v=${plotlyVersion}` });
    script.addEventListener("load", () => done(window.Plotly));
    script.addEventListener("error", () => {
      plotly = null;
      failedToLoad(
        new Refused("The charts cannot be loaded: is the package plotly installed where the dashboard runs?"),
      );
    });
    document.head.append(script);
  });
  return plotly;
}

/** End the charts in `place` and what they listen to; what they drew is removed by the caller. */
function dropCharts(place) {
  for (const chart of [place, ...place.querySelectorAll(".js-plotly-plot")]) {
    if (!chart.classList.contains("js-plotly-plot")) continue;
    window.Plotly.purge(chart);
    for (const name of ["role", "aria-label"]) chart.removeAttribute(name);
    chart.classList.remove("js-plotly-plot");
  }
}

/** Text for Plotly, which takes some for markup. */
const plain = (text) => String(text).slice(0, 120).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

/**
 * Draw curves into `place`, an element that stays. A curve: {name, x, y, stderr?, dash?, steps?};
 * with `steps` a value holds until the next, and x are times. Markers are drawn where points are few.
 * A change of the configuration: {x, iteration, words, run?}, a line with what changed under the pointer.
 */
async function drawCurves(
  place,
  { title, xLabel, yLabel, curves, changes = [], height = 270, xRange = null },
) {
  const shown = curves.filter((curve) => curve.y.some(known));
  if (!shown.length) return renew(place, empty(`${title}: nothing recorded yet.`));
  const Plotly = await loadPlotly();
  if (!place.isConnected) return; // the view was left meanwhile
  if (!place.querySelector(".plotly")) place.replaceChildren();
  const traces = shown.map((curve, index) => {
    const few = curve.y.length <= 60;
    const [color, name] = [lineColour(index), plain(curve.name)];
    const line = { color, width: 2, dash: curve.dash ?? "solid" };
    const trace = { type: "scatter", name, x: curve.x, y: curve.y, connectgaps: false };
    if (curve.steps)
      return {
        ...trace,
        mode: "lines",
        line: { ...line, shape: "hv" },
        hovertemplate: `%{y:.5g} from %{x|%H:%M:%S}<extra>${name}</extra>`,
      };
    return {
      ...trace,
      mode: few ? "lines+markers" : "lines",
      line,
      marker: { size: 5 },
      ...(curve.stderr
        ? {
            error_y: {
              type: "data",
              array: curve.stderr,
              visible: true,
              thickness: 1,
              width: few ? 3 : 0,
              color,
            },
          }
        : {}),
      hovertemplate: `%{y:.5g} at %{x:.6~g}<extra>${name}</extra>`,
    };
  });
  const axis = {
    gridcolor: inColour("--line"),
    zerolinecolor: inColour("--line"),
    linecolor: inColour("--line"),
    automargin: true,
  };
  const narrow = place.clientWidth < 520;
  const marks = changes.filter(({ x }) => known(x));
  const layout = {
    title: { text: plain(title), font: { size: 14 }, x: 0, xref: "paper", xanchor: "left" },
    height,
    margin: { l: 52, r: 14, t: 38, b: 44 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: inColour("--ink"), family: getComputedStyle(document.body).fontFamily, size: 12 },
    xaxis: { ...axis, title: { text: plain(xLabel) }, ...(xRange ? { range: xRange } : {}) },
    yaxis: {
      ...axis,
      title: { text: plain(yLabel ?? "") },
      ...(shown.some((curve) => curve.steps) ? { rangemode: "tozero" } : {}),
    },
    showlegend: shown.length > 1,
    // Above, more than two names would cover the title.
    legend:
      narrow || shown.length > 2
        ? { orientation: "h", y: -0.32, x: 0 }
        : { orientation: "h", y: 1.02, yanchor: "bottom", x: 1, xanchor: "right" },
    hovermode: "closest",
    shapes: marks.map(({ x }) => ({
      type: "line",
      yref: "paper",
      ...{ x0: x, x1: x, y0: 0, y1: 1 },
      line: { color: inColour("--faint"), width: 1, dash: "dot" },
    })),
    annotations: marks.map((change) => ({
      ...{ x: change.x, y: 1, yref: "paper", yanchor: "top", text: "▾", showarrow: false },
      hovertext: changeInWords(change).slice(0, 12).map(plain).join("<br>"),
    })),
  };
  const options = {
    responsive: true,
    displaylogo: false,
    modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"],
  };
  await Plotly.react(place, traces, layout, options);
  place.setAttribute("role", "img");
  place.setAttribute(
    "aria-label",
    [
      `${title}: ${shown.map((curve) => `${curve.name} ends at ${figure(curve.y.findLast(known))}`).join(", ")}`,
      ...marks.map((change) => changeInWords(change).join("; ")),
    ].join(". "),
  );
}

const changeInWords = ({ iteration, words, run }) => [
  `${run ? `${run} from` : "From"} iteration ${iteration} on`,
  ...words,
];

/** Exponential moving average of weight `share`; gaps stay. */
function smoothed(values, share) {
  if (!share) return values;
  let mean = null;
  return values.map((value) => {
    if (!known(value)) return null;
    mean = mean === null ? value : share * mean + (1 - share) * value;
    return mean;
  });
}

const swatchOf = (phase, text) =>
  h("span", {}, h("span", { class: "swatch", style: { background: phaseColour(phase) } }), text);

/** One bar of shares with its legend: {phase: amount}. */
function phaseBar(amounts, unit) {
  const parts = Object.entries(amounts)
    .filter(([, amount]) => amount > 0)
    .sort((a, b) => b[1] - a[1]);
  const total = parts.reduce((sum, [, amount]) => sum + amount, 0);
  if (!total) return empty("Nothing billed yet.");
  const shares = parts.map(
    ([phase, amount]) =>
      `${words(phase)} ${((100 * amount) / total).toFixed(amount / total < 0.01 ? 1 : 0)} %`,
  );
  return h(
    "div",
    {},
    h(
      "div",
      { class: "stack", role: "img", "aria-label": shares.join(", ") },
      parts.map(([phase, amount]) =>
        h("div", {
          style: { width: `${(100 * amount) / total}%`, background: phaseColour(phase) },
          title: `${words(phase)}: ${unit(amount)}`,
        }),
      ),
    ),
    h(
      "div",
      { class: "legend" },
      parts.map(([phase, amount], index) => swatchOf(phase, `${shares[index]} (${unit(amount)})`)),
    ),
  );
}

// -- lanes --

const MARKS = {
  node_noticed: "▼",
  notice_cancelled: "○",
  node_drained: "▽",
  node_lost: "✕",
  worker_crashed: "!",
  learner_lost: "◆",
  learner_waits: "◇",
  learner_placed: "▶",
  on_demand: "＄",
  node_returned: "↩",
};

/** Draw one worker's lane; marks are incidents of its node. */
function drawLane(canvas, lane, phases, start, end, marks) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const draw = canvas.getContext("2d");
  draw.scale(ratio, ratio);
  const across = (at) => ((at - start) / (end - start || 1)) * width;
  for (const [from, to, phase] of lane.stretches) {
    draw.fillStyle = phaseColour(phases[phase]);
    const left = Math.round(across(from) * ratio) / ratio; // whole pixels: no seams between neighbours
    draw.fillRect(left, 0, Math.max(1 / ratio, Math.round(across(to) * ratio) / ratio - left), height);
    if (phases[phase] === "lost") hatch(draw, across(from), across(to), height);
  }
  draw.font = "bold 12px system-ui";
  draw.lineWidth = 3;
  draw.lineJoin = "round";
  draw.textAlign = "center";
  draw.textBaseline = "middle";
  for (const mark of marks) {
    const x = Math.min(width - 6, Math.max(6, across(mark.at)));
    draw.strokeStyle = inColour("--card");
    draw.strokeText(MARKS[mark.kind], x, height / 2 + 1);
    draw.fillStyle = inColour("--ink");
    draw.fillText(MARKS[mark.kind], x, height / 2 + 1);
  }
}

function hatch(draw, from, to, height) {
  draw.strokeStyle = "rgb(0 0 0 / .45)";
  draw.lineWidth = 1;
  draw.save();
  draw.beginPath();
  draw.rect(from, 0, to - from, height);
  draw.clip();
  for (let x = from - height; x < to; x += 5) {
    draw.beginPath();
    draw.moveTo(x, height);
    draw.lineTo(x + height, 0);
    draw.stroke();
  }
  draw.restore();
}

/**
 * All lanes of a page, with a line that tells what is under the pointer or chosen by the arrow keys. What
 * that is stays in `selection` ({lane, at, text}) for the lanes that are drawn next.
 */
function lanesOf(found, selection) {
  const tip = h(
    "div",
    { class: "tip", "aria-live": "polite" },
    selection.text ?? "Point at a lane, or focus it and use the arrow keys.",
  );
  const say = (text) => {
    tip.textContent = selection.text = text;
  };
  const drawings = [];
  const moved = found.events.some((event) => event.subject === "learner");
  const learner = { worker: "learner", node: "learner", from: found.start, to: found.end, stretches: [] };
  const rows = [...(moved ? [learner] : []), ...found.lanes].map((lane) => {
    const marks = found.events.filter(
      (event) =>
        event.kind in MARKS &&
        [lane.node, lane.worker].includes(event.subject) &&
        event.at >= lane.from - 1 &&
        event.at <= lane.to + 1,
    );
    const canvas = h("canvas", {
      tabindex: "0",
      "data-key": lane.worker,
      role: "img",
      "aria-label":
        lane === learner
          ? `learner: ${plural(marks.length, "incident")}`
          : `${lane.worker}: ${duration(lane.billed_s)} billed`,
    });
    let chosen = -1;
    const sayMark = (mark) => say(`${mark.subject}: ${words(mark.kind)} at ${clock(mark.at)} ${mark.detail}`);
    const select = (index) => {
      chosen = index;
      if (lane === learner && marks[index]) sayMark(marks[index]);
      const stretch = lane.stretches[index];
      Object.assign(selection, { lane: lane.worker, at: lane === learner ? marks[index]?.at : stretch?.[0] });
      if (stretch)
        say(
          `${lane.worker}: ${words(found.phases[stretch[2]])} for ${figure(stretch[1] - stretch[0], 3)} s from ${clock(stretch[0])}, at ${dollars(lane.usd_h)} an hour`,
        );
    };
    canvas.addEventListener("pointermove", (event) => {
      const at = found.start + (event.offsetX / canvas.clientWidth) * (found.end - found.start);
      const mark = marks.find(
        (each) => Math.abs(each.at - at) < ((found.end - found.start) * 7) / canvas.clientWidth,
      );
      if (mark) sayMark(mark);
      else select(lane.stretches.findIndex(([from, to]) => from <= at && at <= to));
    });
    canvas.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      select(Math.min((lane === learner ? marks : lane.stretches).length - 1, Math.max(0, chosen + step)));
    });
    const again =
      selection.lane !== lane.worker
        ? -1
        : lane === learner
          ? marks.findIndex((mark) => mark.at === selection.at)
          : lane.stretches.findIndex(([from, to]) => from <= selection.at && selection.at < to);
    if (again >= 0) select(again);
    drawings.push(() => drawLane(canvas, lane, found.phases, found.start, found.end, marks));
    return h("div", { class: "lane" }, h("div", { class: "name", title: lane.worker }, lane.worker), canvas);
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) =>
    h("span", {}, clock(found.start + share * (found.end - found.start))),
  );
  const whole = h("div", {}, tip, rows, h("div", { class: "ticks" }, h("span"), h("div", {}, ticks)));
  new ResizeObserver(() => drawings.forEach((draw) => draw())).observe(whole);
  return whole;
}
