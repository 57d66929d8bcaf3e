"use strict";
// What votes have taught: the newest round's votes, and the same prompts and noise before and after its update.

const LEARNT_ROWS = 4;

/** A part of the page, and a function that fills it with the answer `votes`. */
function learntView(run) {
  const place = h("section", { class: "learnt", "aria-label": "What was learnt" });
  return {
    place,
    refresh: (found) => fill(place, () => drawnLearnt(run, found.rounds, found.curve)),
  };
}

async function drawnLearnt(run, rounds, vote) {
  const trained = rounds.filter((each) => each.trained);
  if (!trained.length)
    return rounds.length ? h("p", { class: "faint" }, "What was learnt comes here after this round.") : [];
  const iterations = (await ask(run, "pictures")).iterations;
  const afterOf = ({ iteration }) => iterations.find((at) => at > iteration);
  const shown = trained.find((each) => afterOf(each) !== undefined) ?? trained[0];
  const newer = trained[0] !== shown ? trained[0].iteration + 1 : null;
  return [
    h("h2", {}, `What was learnt in round ${shown.iteration + 1}`),
    h("p", {}, roundInWords(shown)),
    afterOf(shown) === undefined
      ? h("p", { class: "faint" }, "Its pictures come with the votes of the next.")
      : await beforeAndAfter(run, iterations, afterOf(shown), vote),
    newer
      ? h(
          "p",
          { class: "faint" },
          `Round ${newer} is learnt, too: its pictures come with the votes of the next.`,
        )
      : null,
    rounds.length > 1 || Object.keys(shown.agree).length ? roundsTable(rounds) : null,
  ];
}

function roundInWords({ groups, voted, undecided, vote_s, pairs }) {
  return [
    `The model was updated with ${voted} of ${plural(groups, "group")}`,
    voted < groups ? ` (${groups - voted} without a vote)` : "",
    undecided ? `, of which ${undecided} all alike, from which nothing is learnt` : "",
    `: ${plural(pairs, "pair")} of pictures with a better one`,
    known(vote_s) ? `, in ${Number(vote_s.toPrecision(2))} s a vote.` : ".",
  ].join("");
}

async function beforeAndAfter(run, iterations, after, vote) {
  const place = iterations.indexOf(after);
  const shown = [...new Set([0, Math.max(0, place - 1), place])].map((at) => iterations[at]);
  const evaluations = await Promise.all(shown.map((iteration) => ask(run, "evaluation", { iteration })));
  const named = (at) => (at === after ? "after" : at === 0 ? "at the start" : "before");
  const by = evaluations.map((each) => new Map(each.pictures.map((picture) => [picture.index, picture])));
  const rows = evaluations.at(-1).pictures.slice(0, LEARNT_ROWS);
  return [
    h("p", { class: "faint" }, "Held-out prompts, each from the same noise; a click enlarges."),
    h(
      "div",
      { class: "pictures triples" },
      rows.map((picture) =>
        h(
          "div",
          { class: "picture" },
          h(
            "div",
            { class: "frames" },
            shown.map((iteration, at) =>
              by[at].has(picture.index)
                ? frameOf(run, by[at].get(picture.index), iteration, iterations, {
                    key: `${picture.index} ${at}`,
                    enlarges: `enlarge, ${named(iteration)}`,
                    caption: named(iteration),
                  })
                : null,
            ),
          ),
          h("div", { class: "words clamp", dir: "auto" }, picture.caption.slice(0, 1000)),
          h("div", { class: "scores" }, scoresBySide(by, picture.index, vote)),
        ),
      ),
    ),
  ];
}

/** Other rewards of one picture, from the first of its versions to the last; nobody votes on these. */
function scoresBySide(by, index, vote) {
  const [first, last] = [by[0], by.at(-1)].map((each) => each.get(index)?.scores ?? {});
  return Object.keys(last)
    .filter((name) => !["reward", vote].includes(name) && !name.includes("/") && name in first)
    .map((name) => [
      h("span", {}, name),
      h("span", {}, `${figure(first[name], 3)} → ${figure(last[name], 3)}`),
    ]);
}

function roundsTable(rounds) {
  const names = [...new Set(rounds.flatMap((each) => Object.keys(each.agree)))].slice(0, 6);
  return table(
    [
      ["Round", (each) => String(each.iteration + 1), "number"],
      ["Groups voted on", (each) => `${each.voted} of ${each.groups}`, "number"],
      ["Pairs with a better one", (each) => count(each.pairs), "number"],
      ["Model", (each) => (each.trained ? "updated" : "waits for votes")],
      ...names.map((name) => [`${name} agrees with you`, (each) => percent(each.agree[name]), "number"]),
    ],
    rounds,
    "Rounds of votes",
  );
}
const percent = (share) => (known(share) ? `${Math.round(100 * share)} %` : "–");
