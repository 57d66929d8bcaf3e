"use strict";
// Votes: one group of pictures at a time, which a person ranks as far as they care to.

const voteChoice = { name: "", said: "" };
const VOTE_AFTER_MS = 500; // of a group's pictures being there: a double click is not for the next group

function votesView(place, { run }) {
  const status = h("p", { class: "faint", role: "status" }, voteChoice.said);
  const body = h("div");
  const learnt = learntView(run);
  place.replaceChildren(body, status, learnt.place);
  let shown = null,
    showLeft = null,
    onKey = null;

  const say = (text) => {
    voteChoice.said = status.textContent = text;
  };

  async function refresh() {
    try {
      const found = await ask(run, "votes");
      learnt.refresh(found);
      const now = found.ballots.find((each) => each.id === shown);
      if (now) return showLeft(now); // a person is at it
      const [next] = found.ballots;
      shown = next?.id ?? null;
      if (!next)
        return rest(empty("Nobody is asked now. A group of pictures comes here when one is to be voted on."));
      body.replaceChildren(ballotOf(next, found.ballots.length - 1 + found.more));
    } catch (error) {
      if (shown) say(error.message);
      else body.replaceChildren(failed(error));
    }
  }

  function rest(...said) {
    onKey = null;
    body.replaceChildren(...said);
  }
  const listen = (event) => {
    if (!place.contains(body)) return document.removeEventListener("keydown", listen);
    if (
      event.ctrlKey ||
      event.altKey ||
      event.metaKey ||
      event.target.closest("input, select, textarea, dialog")
    )
      return;
    onKey?.(event);
  };
  document.addEventListener("keydown", listen);

  function ballotOf(ballot, others) {
    const pictureOf = (name) => runAddress(run, "ballots", ballot.id, name);
    const ranking = [];
    const loaded = new Set();
    let ready = false;
    const buttons = new Map(
      ballot.pictures.map((name, index) => {
        const badge = h("span", { class: "rank", "aria-hidden": "true" });
        const picture = h("img", {
          src: pictureOf(name),
          alt: "",
          on: { load: (event) => seen(name, event.target), error: (event) => again(event.target) },
        });
        const button = buttonOf([picture, badge], () => pick(name), { "aria-pressed": "false" });
        return [name, { button, badge, number: index + 1 }];
      }),
    );
    const name = ballot.asks_name
      ? h("input", {
          type: "text",
          maxlength: "200",
          value: voteChoice.name,
          on: {
            input: () => {
              voteChoice.name = name.value;
              draw();
            },
          },
        })
      : null;
    const vote = buttonOf("Vote", () => send(ranking));
    const alike = buttonOf("All alike", () => send([]));
    const clear = buttonOf("Clear", () => {
      ranking.length = 0;
      draw();
    });

    function seen(picture, image) {
      image.classList.toggle("small", image.naturalWidth < 160);
      loaded.add(picture);
      if (loaded.size === ballot.pictures.length)
        setTimeout(() => {
          ready = true;
          draw();
        }, VOTE_AFTER_MS);
    }
    function again(image) {
      setTimeout(() => {
        if (image.isConnected) image.src = image.getAttribute("src");
      }, 2000);
    }
    function pick(chosen) {
      const at = ranking.indexOf(chosen);
      if (at >= 0) ranking.splice(at, 1);
      else ranking.push(chosen);
      draw();
    }
    function draw() {
      for (const [each, { button, badge, number }] of buttons) {
        const at = ranking.indexOf(each);
        button.disabled = !ready;
        badge.textContent = at >= 0 ? String(at + 1) : "";
        button.setAttribute("aria-pressed", String(at >= 0));
        button.setAttribute("aria-label", `picture ${number}${at >= 0 ? `, place ${at + 1}` : ""}`);
      }
      const able = ready && (!name || name.value.trim() !== "");
      [vote.disabled, alike.disabled, clear.disabled] = [!ranking.length || !able, !able, !ranking.length];
    }
    async function send(chosen) {
      [vote.disabled, alike.disabled, onKey] = [true, true, null];
      try {
        await sent(runAddress(run, "ballots", ballot.id), {
          ranking: chosen,
          voter: name?.value ?? "",
        });
        say("Your vote is recorded.");
        shown = null;
        rest(empty("The next group comes when its pictures are made."));
      } catch (error) {
        say(error.message);
        onKey = keys;
        draw();
        if (error.status === 409) shown = null;
      }
      await refresh();
    }
    const keys = (event) => {
      const chosen = ballot.pictures[Number(event.key) - 1];
      if (chosen && ready) return pick(chosen);
      if (event.key === "0" && !alike.disabled) return send([]);
      if (event.key === "Backspace" && !clear.disabled) return clear.click();
      // On a button it presses that.
      if (event.key === "Enter" && !vote.disabled && !event.target.closest("button, a")) return send(ranking);
    };
    onKey = keys;
    const left = h("span", { class: "faint" });
    showLeft = (found) => {
      left.textContent = `taken for another ${duration(found.left_s)}`;
    };
    showLeft(ballot);
    draw();
    return h(
      "div",
      { class: "ballot", "data-ballot": ballot.id },
      h(
        "h2",
        { class: "words clamp", dir: "auto", title: ballot.prompt.slice(0, 500) },
        ballot.prompt.slice(0, 4000),
      ),
      h(
        "p",
        { class: "faint" },
        "Which shows it best? Choose one, or several in their order, the best first; those not chosen come after them, all alike. Keys: 1, 2, … choose, Enter votes, 0 all alike, Backspace clears.",
      ),
      ballot.references.length ? referencesOf(ballot.references.map(pictureOf)) : null,
      h(
        "div",
        { class: "pictures" },
        [...buttons.values()].map(({ button }) => h("div", { class: "picture" }, button)),
      ),
      h(
        "div",
        { class: "controls" },
        name ? h("label", {}, "Your name, which this run keeps", name) : null,
        vote,
        alike,
        clear,
        left,
        others ? h("span", { class: "faint" }, `${plural(others, "other group")} waiting`) : null,
      ),
    );
  }
  return refresh;
}
