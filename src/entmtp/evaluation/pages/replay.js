"use strict";
// Goes through the steps of one generation. Texts come ready made; they enter the page as text only, never as HTML.
(() => {
  const {steps, depth, thresholds} = JSON.parse(document.getElementById("data").textContent);
  if (!steps.length) return;
  const byId = id => document.getElementById(id);
  const spans = [...document.querySelectorAll("#text [data-step]")];
  let current = 1;

  function svg(name, attributes, ...children) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // --- the tree of a step ---------------------------------------------------------------------------------------

  const MARKS = {root: "", kept: "✓ ", cut: "✓ ", rejected: "✗ ", target: "→ "};
  const SAID = {root: "root", kept: "accepted", cut: "accepted past the text's end", rejected: "rejected",
                target: "next root, the target's own"};
  const LONGEST = 14, HEIGHT = 26, ROW = 34, GAP = 30;
  const short = label => [...label].length > LONGEST ? [...label].slice(0, LONGEST - 1).join("") + "…" : label;

  /** Nodes with their parent, class and place: column = depth, a first child on its parent's row. */
  function placed(step) {
    const nodes = step.labels.map((label, i) => ({
      label, id: step.ids[i], parent: step.parents[i], children: [],
      role: i === 0 ? "root" : step.kept.includes(i) ? "kept" : step.cut.includes(i) ? "cut" : "rejected",
    }));
    if (step.next !== null) {
      nodes.push({label: step.next, parent: step.kept[step.kept.length - 1], children: [], role: "target"});
    }
    nodes.forEach((node, i) => { if (node.parent >= 0) nodes[node.parent].children.push(i); });
    let row = 0;
    (function place(i, column) {
      Object.assign(nodes[i], {column, row});
      nodes[i].children.forEach((child, nth) => {
        if (nth) row += 1;
        place(child, column + 1);
      });
    })(0, 0);
    return {nodes, rows: row + 1, columns: Math.max(...nodes.map(node => node.column)) + 1};
  }

  function drawTree(step) {
    const {nodes, rows, columns} = placed(step);
    const widest = Math.max(...nodes.map(node => [...short(node.label)].length)) + 2;
    const width = widest * 8 + 14;
    const left = node => 4 + node.column * (width + GAP), top = node => 4 + node.row * ROW;
    const edges = nodes.filter(node => node.parent >= 0).map(node => {
      const from = nodes[node.parent], x = left(from) + width, y = top(from) + HEIGHT / 2;
      const to = left(node), end = top(node) + HEIGHT / 2, middle = (x + to) / 2;
      return svg("path", {class: `edge ${node.role}`, d: `M${x} ${y}C${middle} ${y} ${middle} ${end} ${to} ${end}`});
    });
    const boxes = nodes.map(node => {
      const title = svg("title", {}), text = svg("text", {x: left(node) + 8, y: top(node) + 17});
      title.textContent = `${SAID[node.role]}: ${node.label}` + (node.id === undefined ? "" : ` (token ${node.id})`);
      text.textContent = MARKS[node.role] + short(node.label);
      const rect = svg("rect", {x: left(node), y: top(node), width, height: HEIGHT, rx: 4});
      return svg("g", {class: `node ${node.role}`}, title, rect, text);
    });
    const size = {width: columns * (width + GAP) - GAP + 8, height: rows * ROW + 4};
    byId("tree").replaceChildren(svg("svg", {...size, role: "img", "aria-label": step.sentence}, ...edges, ...boxes));
  }

  // --- along the generation -------------------------------------------------------------------------------------

  const LEFT = 44, RIGHT = 10, PANEL = 78, PLOT = 46;
  let cursor = null, at = () => 0, slot = 0;

  function panel(number, title, values, most, draw) {
    const top = number * PANEL + 22, y = value => top + PLOT * (1 - value / (most || 1));
    const width = at(steps.length) + slot / 2;
    const caption = svg("text", {x: LEFT, y: top - 8});
    caption.textContent = title;
    const axes = [0, most].flatMap(value => {
      const tick = svg("text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"});
      tick.textContent = Number.isInteger(value) ? value : value.toFixed(2);
      return [svg("line", {class: "axis", x1: LEFT, x2: width, y1: y(value), y2: y(value)}), tick];
    });
    return [caption, ...axes, ...draw(values, y)];
  }

  const bars = (values, y) => values.map((value, i) => svg("rect", {
    class: "bar", x: at(i + 1) - slot * 0.4, width: slot * 0.8, y: y(value), height: y(0) - y(value)}));

  function line(values, y) {
    let path = "", pen = "M";
    values.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      path += `${pen}${at(i + 1).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    });
    const dots = values.map((value, i) => value === null ? null :
      svg("circle", {class: "dot", cx: at(i + 1), cy: y(value), r: 2}));
    return [svg("path", {class: "line", d: path}), ...dots.filter(dot => dot)];
  }

  function drawSignals() {
    const box = byId("signals"), width = Math.max(280, box.clientWidth);
    slot = (width - LEFT - RIGHT) / steps.length;
    at = number => LEFT + (number - 0.5) * slot;
    const column = key => steps.map(step => step[key]);
    const known = key => column(key).some(value => value !== null);
    const most = key => Math.max(...column(key).filter(value => value !== null), 0);
    const panels = [
      ["tree nodes", "nodes", most("nodes"), bars],
      ["num_accepted", "accepted", most("accepted"), bars],
    ];
    const edges = Object.entries(thresholds);
    if (known("path_value")) {
      const named = edges.length && edges.length <= 2 ? ": dashed " + edges.map(([name]) => name).join(", ") : "";
      panels.push([`path value, depth ${depth}${named}`, "path_value", 1, (values, y) => [
        ...edges.map(([, value]) => svg("line", {
          class: "threshold", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value)})),
        ...line(values, y)]]);
    }
    if (known("entropy")) panels.push(["entropy (nats)", "entropy", most("entropy"), line]);
    const height = panels.length * PANEL;
    cursor = svg("rect", {class: "cursor", y: 0, width: Math.max(slot, 3), height});
    const drawn = panels.flatMap(([title, key, top, draw], i) => panel(i, title, column(key), top, draw));
    const label = "Tree nodes, accepted tokens, path value and entropy of every step; the table holds the numbers";
    box.replaceChildren(svg("svg", {width, height, role: "img", "aria-label": label}, cursor, ...drawn));
    moveCursor();
  }

  function moveCursor() {
    cursor.setAttribute("x", at(current) - Math.max(slot, 3) / 2);
  }

  // --- going from step to step ----------------------------------------------------------------------------------

  function show(number) {
    current = Math.min(Math.max(number, 1), steps.length);
    const step = steps[current - 1];
    byId("sentence").textContent = step.sentence;
    byId("facts").replaceChildren(...step.facts.map(([what, value]) => {
      const term = document.createElement("dt"), said = document.createElement("dd"), pair = document.createElement("div");
      term.textContent = what;
      said.textContent = value;
      pair.append(term, said);
      return pair;
    }));
    spans.forEach((span, i) => {
      span.classList.toggle("now", i === current - 1);
      span.classList.toggle("later", i >= current);
    });
    const slider = byId("slider");
    slider.value = current;
    slider.setAttribute("aria-valuetext", `step ${current} of ${steps.length}`);
    for (const id of ["first", "previous"]) byId(id).disabled = current === 1;
    for (const id of ["next", "last"]) byId(id).disabled = current === steps.length;
    drawTree(step);
    if (cursor) moveCursor();
  }

  function showHash() {
    const asked = /^#step-(\d+)$/.exec(location.hash);
    if (!asked) return;
    show(Number(asked[1]));
    byId("stage").scrollIntoView();
  }

  byId("stage").hidden = byId("figure-signals").hidden = false;
  byId("first").addEventListener("click", () => show(1));
  byId("previous").addEventListener("click", () => show(current - 1));
  byId("next").addEventListener("click", () => show(current + 1));
  byId("last").addEventListener("click", () => show(steps.length));
  byId("slider").addEventListener("input", event => show(Number(event.target.value)));
  byId("text").addEventListener("click", event => {
    const span = event.target.closest("[data-step]");
    if (span) show(Number(span.dataset.step));
  });
  byId("signals").addEventListener("click", event => {
    const x = event.clientX - byId("signals").getBoundingClientRect().left;
    show(Math.round((x - LEFT) / slot + 0.5));
  });
  document.addEventListener("keydown", event => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (event.target.closest("input, .scroll, summary, table")) return;  // they have a use for arrows of their own
    if (event.key === "ArrowLeft") show(current - 1);
    if (event.key === "ArrowRight") show(current + 1);
  });
  addEventListener("hashchange", showHash);
  addEventListener("resize", drawSignals);
  show(1);
  drawSignals();
  showHash();
})();
