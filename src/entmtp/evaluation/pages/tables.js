"use strict";
// Sorting and filtering of the page's tables. Without it they read as they stand.
(() => {
  const collator = new Intl.Collator(undefined, {numeric: true});

  /** What a cell sorts by: its data-value where it has one, else its text. */
  const valueOf = cell => cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);

  /** Numbers, then words, then what is missing: in this order in both directions. */
  const group = value => typeof value === "number" ? 0 : value === "" || value === "–" ? 2 : 1;

  function sorted(rows, column, direction) {
    const entries = rows.map((row, place) => ({row, place, value: valueOf(row.cells[column])}));
    const compare = (a, b) => group(a) - group(b) ||
      direction * (group(a) === 0 ? a - b : collator.compare(a, b));
    entries.sort((a, b) => compare(a.value, b.value) || a.place - b.place);
    return entries.map(entry => entry.row);
  }

  /** A button in every heading: ascending, descending, as it was. */
  function makeSortable(table) {
    const body = table.tBodies[0], asWritten = [...body.rows], heads = [...table.tHead.rows[0].cells];
    const next = {none: "ascending", ascending: "descending", descending: "none"};
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const state = next[head.getAttribute("aria-sort")];
        for (const other of heads) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", state);
        table.classList.toggle("sorted", state !== "none");
        body.append(...(state === "none" ? asWritten : sorted(asWritten, column, state === "ascending" ? 1 : -1)));
      });
    });
  }

  /** Check boxes named task and policy; a row shows when both of its own are checked ("*": when all are). */
  function makeFilter(form) {
    const rows = [...document.querySelectorAll("tr[data-task]")];
    const box = form.closest("details"), status = box.querySelector("[role=status]");
    const boxes = name => [...form.querySelectorAll(`input[name=${name}]`)];
    const allows = (name, value) => value === "*"
      ? name === "policy" || boxes(name).every(box => box.checked)
      : boxes(name).some(box => box.checked && box.value === value);
    function apply() {
      for (const row of rows) row.hidden = !(allows("task", row.dataset.task) && allows("policy", row.dataset.policy));
      const shown = rows.filter(row => !row.hidden).length;
      status.textContent = shown === rows.length ? "All rows are shown." : `${shown} of ${rows.length} rows are shown.`;
    }
    form.addEventListener("change", apply);
    form.addEventListener("submit", event => event.preventDefault());
    for (const button of form.querySelectorAll("button[data-name]")) {
      button.addEventListener("click", () => {
        for (const box of boxes(button.dataset.name)) box.checked = button.dataset.check === "all";
        apply();
      });
    }
    box.hidden = false;
    apply();  // a reloaded page may remember boxes
  }

  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll("form.filter").forEach(makeFilter);
})();
