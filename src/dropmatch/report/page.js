"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");

  const make = (tag, options = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), options);
    element.append(...children);
    return element;
  };
  const select = (label, names, onChange) => {
    const field = make("select", {}, ...names.map((name, i) => make("option", { value: String(i), textContent: name })));
    field.addEventListener("change", onChange);
    return [make("label", {}, label, field), field];
  };
  const prompt = (entry) =>
    make("details", { className: "prompt" }, make("summary", { textContent: "the prompt" }),
      ...entry.turns.map((turn) => make("p", { className: "text", textContent: turn })));

  // controls that turn text around or are not seen at all are written out
  const controls = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/.source;
  // a joiner between letters or pictures shapes them, as in Persian words and emoji of families; elsewhere it is hidden
  const joiner = /(?<![\p{L}\p{M}\p{Extended_Pictographic}\p{Emoji_Modifier}\ufe0f])[\u200c\u200d]|[\u200c\u200d](?![\p{L}\p{M}\p{Extended_Pictographic}])/u.source;
  const hidden = new RegExp(`${controls}|${joiner}`, "gu");
  const named = (text) =>
    text.replace(hidden, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
  const shown = (piece) => {
    if (piece === "") return [make("span", { className: "mark", textContent: "·" })];
    return named(piece).split(/(\n|\t)/).filter(Boolean).flatMap((part) =>
      part === "\n" ? [make("span", { className: "mark", textContent: "↵" }), "\n"]
        : part === "\t" ? [make("span", { className: "mark", textContent: "⇥" }), "\t"] : [part]);
  };

  const quoted = (piece) => `“${named(piece).replace(/\n/g, "↵").replace(/\t/g, "⇥")}”`;
  const divergence = (js, radius) => {
    const figure = (x) => x === null ? "unknown" : x.toFixed(4);
    return `divergence ${figure(js)}, radius ${figure(radius)} nats`;
  };

  // -- strips
  const describe = (strip, i) => {
    const [label, words] = data.reasons[strip.reasons[i]];
    const lines = [`${quoted(strip.pieces[i])}, token ${strip.tokens[i]}, place ${i}`, `${label}: ${words}`];
    const lossy = strip.lossy[i], judged = strip.judged[i];
    const prob = lossy ? lossy[2] : Math.exp(strip.logprobs[i]);
    lines.push(`probability ${prob.toFixed(4)}, log-probability ${strip.logprobs[i].toFixed(2).replace("-", "−")}`);
    if (lossy) lines.push(`lossy: the target's own token is ${lossy[1] === null ? `token ${lossy[0]}` : quoted(lossy[1])}, probability ${lossy[3].toFixed(4)}`);
    if (judged) lines.push(divergence(judged[0], judged[1]));
    return lines.join("\n");
  };
  let anchor = null;  // what the tip speaks of
  const move = () => {
    const box = anchor.getClientRects()[0] || anchor.getBoundingClientRect();
    const frame = anchor.closest(".tokens")?.getBoundingClientRect() ?? { top: 0, bottom: window.innerHeight };
    if (box.bottom <= Math.max(frame.top, 0) || box.top >= Math.min(frame.bottom, window.innerHeight)) { hide(); return; }
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${left}px`;
    tip.style.top = `${above >= 4 ? above : box.bottom + 6}px`;
  };
  const place = (text, element) => {
    anchor = element;
    tip.textContent = text;
    tip.hidden = false;
    move();
  };
  const hide = () => { anchor = null; tip.hidden = true; };
  for (const happening of ["scroll", "resize"]) {
    window.addEventListener(happening, () => { if (anchor) move(); }, { capture: true, passive: true });
  }
  const stripOf = (item, name, strip) => {
    const tokens = strip.pieces.map((piece, i) => {
      const token = make("span", { className: `token r${strip.reasons[i]}${i in strip.lossy ? " lossy" : ""}`, tabIndex: i ? -1 : 0 }, ...shown(piece));
      token.description = describe(strip, i);
      token.setAttribute("aria-describedby", "tip");
      return token;
    });
    const box = make("div", { className: "tokens" }, ...tokens);
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", `Tokens of ${name}. Arrow keys move from token to token.`);
    box.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".token");
      if (token) place(token.description, token); else hide();
    });
    box.addEventListener("pointerleave", hide);
    box.addEventListener("focusin", (event) => { if (event.target.description) place(event.target.description, event.target); });
    box.addEventListener("focusout", hide);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      const at = tokens.indexOf(document.activeElement);
      const steps = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: tokens.length - 1 };
      if (at < 0 || !(event.key in steps)) return;
      event.preventDefault();
      const next = tokens[Math.max(0, Math.min(tokens.length - 1, steps[event.key]))];
      tokens[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    });
    const lossy = Object.keys(strip.lossy).length;
    return make("div", { className: "strip" },
      make("h3", {}, name, make("small", { textContent: `${item}, ${tokens.length} tokens, ${lossy} lossy` })), box);
  };
  const strips = document.getElementById("strips");
  let openToken = () => false;  // shows a token of a rule's answer to a prompt, where it was written out
  if (data.strips.length === 0) {
    strips.append(make("p", { textContent: "No single tokens were written out; dropmatch compare --strips N does." }));
  } else {
    const out = make("div");
    const show = () => {
      const entry = data.strips[Number(items.value)];
      const names = rules.value === "every" ? Object.keys(entry.arms) : [rules.selectedOptions[0].textContent].filter((name) => name in entry.arms);
      hide();
      out.replaceChildren(prompt(entry), ...names.map((name) => stripOf(entry.item, name, entry.arms[name])));
    };
    const count = (name) => data.strips.reduce((sum, entry) => sum + Object.keys(entry.arms[name]?.lossy ?? {}).length, 0);
    const names = [...new Set(data.strips.flatMap((entry) => Object.keys(entry.arms)))];
    const [itemLabel, items] = select("prompt", data.strips.map((entry) => entry.item), show);
    const [ruleLabel, rules] = select("rule", names, show);
    rules.append(make("option", { value: "every", textContent: "every rule" }));
    rules.value = String(names.reduce((best, name, i) => (count(name) > count(names[best]) ? i : best), 0));
    strips.append(make("div", { className: "controls" }, itemLabel, ruleLabel), out);
    if (data.strips.length < data.strips_of) {
      strips.append(make("p", { className: "note", textContent: `${data.strips.length} of ${data.strips_of} prompts that were written out; the results file has all.` }));
    }
    show();
    openToken = (item, arm, at) => {
      const i = data.strips.findIndex((entry) => entry.item === item && arm in entry.arms);
      if (i < 0) return false;
      items.value = String(i);
      rules.value = String(names.indexOf(arm));
      show();
      const token = out.querySelectorAll(".token")[at];
      out.querySelector(".token[tabindex='0']").tabIndex = -1;
      token.tabIndex = 0;
      token.focus();
      return true;
    };
  }

  // -- divergence and radius
  document.querySelectorAll(".scatters svg").forEach((svg, number) => {
    const { arm, points } = data.points[number];
    const marks = Array.from(svg.querySelectorAll('[id*="-points-"] use'), (mark) => [Number(mark.getAttribute("x")), Number(mark.getAttribute("y"))]);
    const order = points.map((_, i) => i).sort((a, b) => points[a][4] - points[b][4]);
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
    ring.setAttribute("r", "6");
    ring.setAttribute("class", "ring");
    let at = -1;  // the point that is shown
    const describe = ([item, index, reason, js, radius, prob]) => {
      const [label, words] = data.reasons[reason];
      const where = index >= 0 ? `token ${index}` : reason ? "a draft behind a rejected token" : "a draft";
      return [`${where} of ${data.items[item]}`, `${label}: ${words}`, divergence(js, radius),
        ...(prob === null ? [] : [`probability ${prob.toFixed(4)}`])].join("\n");
    };
    const show = (i) => {
      at = i;
      if (i < 0) { ring.remove(); hide(); return; }
      ring.setAttribute("cx", marks[i][0]);
      ring.setAttribute("cy", marks[i][1]);
      svg.append(ring);
      place(describe(points[i]), ring);
    };
    const nearest = (event) => {
      const from = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      let best = -1, least = 10;
      marks.forEach(([x, y], i) => {
        const far = Math.hypot(x - from.x, y - from.y);
        if (far < least) { best = i; least = far; }
      });
      return best;
    };
    const follow = () => at >= 0 && points[at][1] >= 0 && openToken(data.items[points[at][0]], arm, points[at][1]);
    svg.tabIndex = 0;
    svg.setAttribute("aria-describedby", "tip");
    svg.addEventListener("pointermove", (event) => { if (event.pointerType !== "touch") show(nearest(event)); });
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") show(-1); });
    svg.addEventListener("click", (event) => {  // on a touch screen the first tap shows a point, the second leads on
      const i = nearest(event);
      if (i >= 0 && i === at) follow(); else show(i);
    });
    svg.addEventListener("focus", () => tip.setAttribute("aria-live", "polite"));
    svg.addEventListener("blur", () => { tip.removeAttribute("aria-live"); show(-1); });
    svg.addEventListener("keydown", (event) => {
      const rank = order.indexOf(at);
      const steps = { ArrowRight: rank + 1, ArrowDown: rank + 1, ArrowLeft: rank - 1, ArrowUp: rank - 1, Home: 0, End: order.length - 1 };
      if (event.key === "Escape") show(-1);
      else if (event.key === "Enter") follow();
      else if (event.key in steps) show(order[Math.max(0, Math.min(order.length - 1, steps[event.key]))]);
      else return;
      event.preventDefault();
    });
  });

  // -- answers
  const near = 160;
  const graded = (correct) => correct === null ? "" : make("span", { className: correct ? "right" : "wrong", textContent: correct ? " ✓ right" : " ✗ wrong" });
  const answerOf = (title, correct, start, rest) => {
    const cut = start.length > near * 1.5 ? start.length - near : 0;
    const body = make("div", { className: "text", tabIndex: 0 });
    body.setAttribute("role", "region");
    body.setAttribute("aria-label", title);
    if (cut) {
      body.append(make("details", { className: "shared" },
        make("summary", { textContent: `the same first ${cut} characters` }), named(start.slice(0, cut).join(""))));
    }
    body.append(make("div", { className: "text shared", textContent: named(start.slice(cut).join("")) }));
    body.append(rest.length ? make("div", { className: "text parted", textContent: named(rest.join("")) })
      : make("div", { className: "shared", textContent: "(ends here)" }));
    return make("div", {}, make("h3", {}, title, graded(correct)), body);
  };
  const pairs = document.getElementById("pairs");
  if (data.answers.length === 0 || Object.keys(data.answers[0].arms).length === 0) {
    pairs.append(make("p", { textContent: "Answers stand side by side where lossless or plain decoding and another rule were run." }));
  } else {
    const out = make("div");
    const show = () => {
      const entry = data.answers[Number(items.value)];
      const name = rules.selectedOptions[0].textContent;
      const arm = entry.arms[name];
      const base = Array.from(entry.texts[arm.text]);  // by character, as `at` counts
      const start = base.slice(0, arm.at);
      const parts = arm.token === null ? "the answers are the same" : `the answers part at token ${arm.token}`;
      out.replaceChildren(prompt(entry), make("p", { className: "note", textContent: `${entry.item}: ${parts}.` }),
        make("div", { className: "pair" }, answerOf(arm.base, arm.correct[0], start, base.slice(arm.at)),
          answerOf(name, arm.correct[1], start, Array.from(arm.rest))));
    };
    const names = Object.keys(data.answers[0].arms);
    const changed = (name) => data.answers.reduce((sum, entry) => sum + (entry.arms[name].token !== null), 0);
    const note = (entry) => `${entry.item}${entry.regraded ? " (grade changed)" : entry.changed ? "" : " (all the same)"}`;
    const [itemLabel, items] = select("prompt", data.answers.map(note), show);
    const [ruleLabel, rules] = select("rule", names, show);
    rules.value = String(names.reduce((best, name, i) => (changed(name) > changed(names[best]) ? i : best), 0));
    items.value = String(Math.max(0, data.answers.findIndex((entry) => entry.arms[names[Number(rules.value)]].token !== null)));
    pairs.append(make("div", { className: "controls" }, itemLabel, ruleLabel), out);
    if (data.answers.length < data.answers_of) {
      pairs.append(make("p", { className: "note", textContent: `${data.answers.length} of ${data.answers_of} prompts, those with a changed grade first; the results file has all.` }));
    }
    show();
  }
})();
