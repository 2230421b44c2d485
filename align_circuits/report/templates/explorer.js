// The controls of `explorer.py`: each sets one trait of the widget, and Python answers with the page in `shown`.

const element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};

const options = names => names.map(name => element("option", {value: name, textContent: name}));

function render({model, el}) {
  document.getElementById(model.get("stand_in"))?.remove(); // the same page, for where no kernel runs this
  const choose = (trait, value) => {
    model.set(trait, value);
    model.save_changes();
  };
  const prompt = element("input", {type: "number", min: 0, onchange: () =>
    prompt.value && prompt.checkValidity() ? choose("prompt", prompt.valueAsNumber) : draw()}); // of no such prompt
  const relation = element("select", {onchange: () => choose("relation", relation.value)});
  const row = element("input", {type: "range", min: 0, onchange: () => choose("row", row.valueAsNumber)});
  const head = element("select", {onchange: () => choose("head", head.value)});
  const ablate = element("input", {type: "checkbox", onchange: () => {
    const others = model.get("ablated").filter(name => name !== head.value);
    choose("ablated", ablate.checked ? [...others, head.value] : others);
  }});
  const none = element("button", {textContent: "ablate none", onclick: () => choose("ablated", [])});
  const status = element("span", {role: "status"});
  const page = element("div", {style: "overflow-x: auto"});
  const labelled = (text, control) => element("label", {}, `${text} `, control);
  el.append(
    element(
      "div",
      {style: "display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; align-items: center"},
      labelled("prompt", prompt), labelled("relation", relation), labelled("query", row), labelled("head", head),
      labelled("ablate this head", ablate), none, status,
    ),
    page,
  );

  const draw = () => {
    const {prompts, relations, rows, heads} = model.get("choices");
    prompt.max = prompts - 1;
    prompt.value = model.get("prompt");
    row.max = Math.max(0, rows - 1);
    row.value = model.get("row");
    relation.replaceChildren(...options(relations));
    relation.value = model.get("relation");
    head.replaceChildren(...options(heads));
    head.value = model.get("head");
    const ablated = model.get("ablated");
    ablate.checked = ablated.includes(head.value);
    none.disabled = !ablated.length;
    status.textContent = ablated.length ? `ablated: ${ablated.join(", ")}` : "";
    page.innerHTML = model.get("shown"); // Python has escaped all texts of tokens
  };
  draw();
  // The page comes last; where it stays the same, what was chosen is drawn all the same.
  const traits = ["choices", "shown", "prompt", "relation", "row", "head", "ablated"];
  for (const trait of traits) model.on(`change:${trait}`, draw);
  return () => { for (const trait of traits) model.off(`change:${trait}`, draw); };
}

export default {render};
