"use strict";
// Pictures: the same prompts and seeds at every evaluation; best and worst of training groups.

const pictureChoice = { at: null, trained: null, mode: "grid", text: "", tag: "", order: "grid" };
const PICTURE_MODES = [
  ["grid", "One evaluation"],
  ["pairs", "Before / after"],
  ["ends", "Best and worst"],
  ["training", "Training groups"],
];
const trains = () => pictureChoice.mode === "training";
const ORDERS = [
  ["grid", "as evaluated"],
  ["best", "best first"],
  ["worst", "worst first"],
  ["gain", "greatest gain first"],
];

function picturesView(place, { run, go }) {
  const choice = pictureChoice;
  const iterations = []; // always the newest, also for a picture that was drawn or enlarged before
  const trained = [];
  const offered = () => (trains() ? trained : iterations);
  const choose = (at) => (choice[trains() ? "trained" : "at"] = at);
  let playing = null;
  const slider = h("input", {
    type: "range",
    min: "0",
    max: "0",
    step: "1",
    "aria-label": "evaluation",
    on: {
      input: () => {
        choose(offered()[slider.value]);
        draw();
      },
    },
  });
  const label = h("output", { class: "faint" });
  const play = buttonOf("▶ Play", () => (playing ? stop() : start()));
  const modes = PICTURE_MODES.map(([mode, name]) =>
    buttonOf(
      name,
      (event) => {
        choice.mode = mode;
        modes.forEach((button) =>
          button.setAttribute("aria-pressed", String(button === event.currentTarget)),
        );
        scale();
        draw();
      },
      { "aria-pressed": String(choice.mode === mode) },
    ),
  );
  const text = h("input", {
    type: "search",
    placeholder: "filter prompts",
    "aria-label": "filter prompts",
    value: choice.text,
    on: {
      input: () => {
        choice.text = text.value;
        draw();
      },
    },
  });
  const tag = h("select", {
    "aria-label": "tag",
    on: {
      change: () => {
        choice.tag = tag.value;
        draw();
      },
    },
  });
  const order = choiceOf(ORDERS, choice.order, (value) => {
    choice.order = value;
    draw();
  });
  const grid = h("div");
  const note = h("p", { class: "faint" });
  const ordered = h("label", {}, "Order", order);
  const measured = h("span");
  const controls = h(
    "div",
    { class: "controls" },
    h("label", {}, measured, slider),
    label,
    play,
    modes,
    text,
    tag,
    ordered,
  );
  place.replaceChildren(controls, grid, note);

  const stop = () => {
    clearInterval(playing);
    playing = null;
    play.textContent = "▶ Play";
  };
  function start() {
    play.textContent = "■ Stop";
    playing = setInterval(() => {
      if (!place.contains(slider)) return stop();
      slider.value = String((Number(slider.value) + 1) % offered().length);
      choose(offered()[slider.value]);
      draw();
    }, 900);
  }

  /** Slider and words for the evaluations, or for the iterations whose groups were kept. */
  function scale() {
    const all = offered();
    slider.max = String(Math.max(0, all.length - 1));
    slider.value = String(Math.max(0, all.indexOf(shownAt())));
    measured.textContent = trains() ? "Iteration" : "Evaluation";
    ordered.hidden = tag.hidden = trains();
    note.textContent = trains()
      ? "What was learnt from: the group with the highest reward, the one with the widest spread, and others. A best picture that you would not choose shows a reward that is fooled; compare the other rewards below it."
      : "The same prompts and seeds at every evaluation.";
    controls.hidden = !iterations.length && !trained.length;
  }

  async function draw() {
    await fill(grid, async () => {
      label.textContent = offered().length ? `iteration ${shownAt()}` : "";
      if (trains()) {
        if (!trained.length)
          return empty(
            "No pictures of training groups: metrics.training_pictures_every says when they are kept.",
          );
        return trainingGroups(run, await ask(run, "training", { iteration: choice.trained }), choice, go);
      }
      if (!iterations.length)
        return empty(
          "No pictures yet: they come with the first evaluation (evaluation.at_start, evaluation.every; none where evaluation.grid_prompts is 0).",
        );
      const [now, first] = await Promise.all([
        ask(run, "evaluation", { iteration: choice.at }),
        ask(run, "evaluation", { iteration: iterations[0] }),
      ]);
      const tags = [...new Set(now.pictures.map((each) => each.tag).filter(Boolean))].sort();
      tag.hidden = tags.length < 2;
      if (!tags.includes(choice.tag)) choice.tag = "";
      renew(
        tag,
        h("option", { value: "" }, "any tag"),
        tags.map((each) => h("option", { value: each }, each)),
      );
      tag.value = choice.tag;
      const rest = now.left_out
        ? h(
            "p",
            { class: "faint" },
            `${plural(now.left_out, "more picture")} of this evaluation ${now.left_out === 1 ? "is" : "are"} not in this file.`,
          )
        : null;
      return [drawnPictures(run, now, first, choice, go, iterations), rest];
    });
  }

  return async () => {
    try {
      const found = await ask(run, "pictures");
      choice.at = followed(iterations, found.iterations, choice.at);
      choice.trained = followed(trained, found.training, choice.trained);
      scale();
      await draw();
    } catch (error) {
      renew(grid, failed(error));
    }
  };
}

/** Replace `known` by `found`; returns what is shown: the newest, where that was shown or nothing is. */
function followed(known, found, at) {
  const follows = at === null || at === known.at(-1) || !found.includes(at);
  known.splice(0, known.length, ...found);
  return follows ? (found.at(-1) ?? null) : at;
}

function trainingGroups(run, now, choice, go) {
  const wanted = choice.text.toLowerCase();
  const groups = groupedBy(
    now.pictures
      .filter((each) => each.caption.toLowerCase().includes(wanted))
      .map((each) => ({ ...each, kind: "training" })),
    (each) => Math.floor(each.index / 2),
  );
  if (!groups.size) return empty("No picture matches.");
  return h(
    "div",
    { class: "grid" },
    [...groups.values()].map((group) =>
      endsCard(
        run,
        group.map((each) => [each, each.index % 2 ? "worst" : "best"]),
        [now.iteration],
        go,
        "of this prompt's pictures in the iteration",
      ),
    ),
  );
}

function drawnPictures(run, now, first, choice, go, iterations) {
  const wanted = choice.text.toLowerCase();
  const before = new Map(first.pictures.map((each) => [each.index, each]));
  let shown = now.pictures.filter(
    (each) => each.caption.toLowerCase().includes(wanted) && (!choice.tag || each.tag === choice.tag),
  );
  const gain = (each) => each.score - (before.get(each.index)?.score ?? each.score);
  if (choice.mode === "ends") return bestAndWorst(run, now, shown, go, iterations);
  const by = {
    best: (a, b) => b.score - a.score,
    worst: (a, b) => a.score - b.score,
    gain: (a, b) => gain(b) - gain(a),
  }[choice.order];
  if (by) shown = [...shown].sort(by);
  if (!shown.length) return empty("No picture matches.");
  const pairs = choice.mode === "pairs" && first.iteration !== now.iteration;
  return h(
    "div",
    { class: `pictures${pairs ? " pairs" : ""}` },
    shown.slice(0, 300).map((each) => {
      const old = before.get(each.index);
      const frames =
        pairs && old
          ? [
              [old, first.iteration],
              [each, now.iteration],
            ]
          : [[each, now.iteration]];
      return pictureCard(run, each, frames, go, iterations);
    }),
  );
}

function bestAndWorst(run, now, shown, go, iterations) {
  const prompts = groupedBy(shown, (each) => each.caption);
  if (!prompts.size) return empty("No picture matches.");
  return h(
    "div",
    { class: "grid" },
    [...prompts.values()].slice(0, 100).map((group) => {
      const ranked = [...group].sort((a, b) => b.score - a.score);
      const ends = ranked.length > 1 ? [ranked[0], ranked.at(-1)] : ranked;
      return endsCard(
        run,
        ends.map((each, index) => [each, index ? "worst" : "best"]),
        iterations,
        go,
        `of ${plural(group.length, "picture")} shown of this prompt`,
      );
    }),
  );
}

function endsCard(run, ends, iterations, go, said) {
  return h(
    "div",
    { class: "card" },
    h("h2", { class: "words clamp", dir: "auto" }, ends[0][0].caption.slice(0, 1000)),
    h(
      "div",
      { class: "pictures" },
      ends.map(([each, label]) => pictureCard(run, each, [[each, label]], go, iterations, false)),
    ),
    h("p", { class: "faint" }, said),
  );
}

function pictureCard(run, each, frames, go, iterations, captioned = true) {
  const scores = Object.entries(each.scores);
  return h(
    "div",
    { class: "picture" },
    h(
      "div",
      { class: "frames" },
      frames.map(([picture, label], number) =>
        frameOf(run, picture, shownAt(label), iterations, {
          key: `${picture.index} ${number}`,
          enlarges: "enlarge",
          caption:
            `${label === "best" || label === "worst" ? label : frames.length > 1 ? `at ${label}` : ""}  ${score(picture.score)}`.trim(),
        }),
      ),
    ),
    each.references.length ? referencesOf(each.references.map((name) => referenceAddress(run, name))) : null,
    captioned
      ? h(
          "div",
          { class: "words clamp", dir: "auto", title: each.caption.slice(0, 500) },
          each.caption.slice(0, 1000),
        )
      : null,
    scores.length
      ? h(
          "details",
          { open: !captioned, "data-key": `${pictureChoice.mode} ${each.index}` },
          h("summary", { class: "faint", "data-key": each.index }, "rewards"),
          h(
            "div",
            { class: "scores" },
            scores.map(([name, value]) => [h("span", {}, name), h("span", {}, figure(value))]),
          ),
          each.rollout
            ? h(
                "div",
                { class: "faint words" },
                each.seed ? `seed ${each.seed}${each.tag ? `, ${each.tag}` : ""} ` : "",
                INLINED ? "" : h("a", { href: go.address("samples", each.rollout) }, "its life"),
              )
            : null,
        )
      : null,
  );
}

/** The iteration of a picture labelled so: that one, or the chosen one for `best` and `worst`. */
const shownAt = (label) =>
  typeof label === "number" ? label : trains() ? pictureChoice.trained : pictureChoice.at;

/** A picture as it was at `iteration`, which a click enlarges. */
function frameOf(run, picture, iteration, iterations, { key, enlarges, caption }) {
  return h(
    "figure",
    {},
    buttonOf(image(run, picture, iteration), () => enlarge(run, picture, iteration, iterations), {
      "data-key": key,
      "aria-label": `${enlarges}: ${picture.caption.slice(0, 80)}`,
    }),
    h("figcaption", {}, caption),
  );
}

function image(run, picture, iteration) {
  return h("img", {
    src: pictureAddress(run, picture.kind ?? "picture", iteration, picture.index),
    alt: picture.caption.slice(0, 200),
    loading: "lazy",
    on: {
      load: (event) => event.target.classList.toggle("small", event.target.naturalWidth < 160),
      error: (event) => {
        event.target.alt = "This picture is not here (any more).";
      },
    },
  });
}

/** One picture large, as it was at `iteration`; the arrow keys lead through the evaluations. */
function enlarge(run, picture, iteration, iterations) {
  let at = Math.max(0, iterations.indexOf(iteration));
  const frame = h("div");
  const position = h("p", { class: "faint", "aria-live": "polite" });
  const show = () => {
    frame.replaceChildren(image(run, picture, iterations[at]));
    position.textContent = `Iteration ${iterations[at]} (${at + 1} of ${iterations.length}); arrow keys for others.`;
  };
  const step = (by) => {
    at = Math.min(iterations.length - 1, Math.max(0, at + by));
    show();
  };
  const dialog = h(
    "dialog",
    {
      "aria-label": "Picture",
      on: {
        keydown: (event) => {
          if (event.key === "ArrowLeft") step(-1);
          if (event.key === "ArrowRight") step(1);
        },
        close: () => dialog.remove(),
        click: (event) => {
          if (event.target === dialog) dialog.close();
        },
      },
    },
    frame,
    h("p", { class: "words", dir: "auto" }, picture.caption.slice(0, 4000)),
    position,
    h(
      "div",
      { class: "controls" },
      buttonOf("← Earlier", () => step(-1)),
      buttonOf("Later →", () => step(1)),
      buttonOf("Close", () => dialog.close()),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  show();
}
