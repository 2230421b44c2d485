"""The explorer shows gold, attention and answers of what is chosen, from Python and in a browser."""

import html
import json
import re
import sys
from dataclasses import replace
from importlib.resources import files

import browser
import pytest
import torch
from legs import slow_but
from refusals import raised, refused

import align_circuits as ac
from align_circuits.heads.attention import attention_from

TASK = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=6)

# What Jupyter gives a widget: its traits, told apart by name, and who is told of their changes.
PAGE = """<!doctype html><html lang="en"><body><p id="first">before</p><div id="widget"></div><script type="module">
CODE
const traits = TRAITS, listeners = {}, saved = [];
const model = {
  get: name => traits[name],
  set: (name, value) => { traits[name] = value; saved.push([name, value]); },
  save_changes: () => saved.push("saved"),
  on: (name, act) => { (listeners[name] ??= []).push(act); },
  off: (name, act) => { listeners[name] = listeners[name].filter(each => each !== act); },
};
const change = (name, value) => { traits[name] = value; for (const act of listeners[`change:${name}`]) act(); };
const leave = widget.render({model, el: document.getElementById("widget")});
Object.assign(window, {saved, change, leave, listeners});
</script></body></html>"""

USE = """() => {
  const [prompt, relation, row, head, ablate] = document.querySelectorAll("input, select");
  const press = (control, change) => { change(control); control.dispatchEvent(new Event("change")); };
  const beside = document.getElementById("first");
  const first = document.querySelector("#widget > div:last-child").textContent;
  press(head, control => { control.value = "L3H2"; });
  press(row, control => { control.value = 2; });
  ablate.click();
  press(relation, control => { control.value = "lookup"; });
  press(prompt, control => { control.value = 4; });
  press(prompt, control => { control.value = 99; });
  change("ablated", ["L3H2"]);
  change("shown", "<p>the next page</p>");
  const seen = {
    beside, first, saved, checked: ablate.checked, status: document.querySelector("[role=status]").textContent,
    page: document.querySelector("#widget > div:last-child").textContent, prompt: prompt.value,
    labels: [...document.querySelectorAll("label")].map(label => label.firstChild.textContent.trim()),
  };
  leave();
  return {...seen, left: Object.values(listeners).flat().length};
}"""


@pytest.fixture(scope="module")
def planted():
    model = ac.planted_circuit(TASK, seed=0)
    return model, TASK.sample(8, model.tokenizer, seed=0)


def test_it_shows_the_attention_from_the_chosen_query_to_the_framed_keys(planted):
    model, prompts = planted
    aligner = next(head for head, role in model.roles.items() if role == "align_query")
    explorer = ac.explore(model, prompts)
    explorer.head, explorer.prompt, explorer.row = f"L{aligner[0]}H{aligner[1]}", 3, 1
    relation = prompts[3].relations["align_query"]
    query, keys = relation.query[1:2], relation.keys_of(1)
    share = attention_from(model, prompts[3], [aligner], query)[aligner][0, keys].sum()
    assert f"{share:.2f} of its attention is on the framed keys" in explorer.shown
    assert share > 0.9
    explorer.row = 99
    assert explorer.choices["rows"] == len(relation)
    assert "is on the framed keys" in explorer.shown  # the last query
    assert prompts[3].to_html() in explorer.shown


def test_ablated_heads_change_the_answers_as_ablate_heads_says(planted):
    model, prompts = planted
    explorer = ac.explore(model, prompts, relations=["lookup"])
    lookup = [head for head, role in model.roles.items() if role == "lookup"]
    before = chances(explorer.shown)
    assert len(before) == len(prompts[0].targets)
    explorer.ablated = [lookup[0], lookup[0]]
    assert explorer.ablated == [f"L{lookup[0][0]}H{lookup[0][1]}"]
    columns = chances(explorer.shown, columns=2)
    assert [row[0] for row in columns] == [row[0] for row in before]
    changed = ac.ablate_heads(model, prompts, heads=lookup[:1], metrics=["prob"]).where(kind="all").frame["value"]
    mean = torch.tensor([intact_and_ablated(explorer, index) for index in range(len(prompts))]).mean(0)
    assert mean[1] - mean[0] == pytest.approx(float(changed.iloc[0]), abs=0.01)  # the page has two digits


def test_aligned_texts_are_ablated_to_the_means_of_their_positions():
    model = ac.load("toy-llama-ica")
    texts = [f"ABCABCABCABCA{letter}BC" for letter in "abcdefgh"]
    prompts = ac.Prompts.from_texts(texts, model.tokenizer, answer=[*"abcdefgh"], positions={"letter": -3})
    explorer = ac.explore(model, prompts)
    explorer.ablated = ["L0H0", "L3H2"]
    edit = ac.Ablate([(0, 0), (3, 2)], baseline=ac.ablation_baseline(model, prompts, by="position"))
    expected = ac.answers(model, prompts[0], edits=[edit])["p"].tolist()
    assert [row[1] for row in chances(explorer.shown, columns=2)] == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("ablated", slow_but([["L3H2"]], [[], ["L3H2"]]))
def test_it_counts_answers_as_right_where_evaluate_does(ablated):
    model = ac.load("toy-llama-ica")
    prompts = ac.Seq2SeqTask(x_len=3, phrase_len=2, n_examples=6).sample(12, model.tokenizer, seed=1)
    explorer = ac.explore(model, prompts)
    explorer.ablated = ablated
    wrong, other = 0, 0
    for explorer.prompt in range(len(prompts)):
        rows = re.findall(r"<tr>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", explorer.shown.split("Answers")[1])
        wrong += sum("✗" in predicted for _, predicted in rows)
        other += sum(target != predicted.removesuffix(" ✗") for target, predicted in rows)
    accuracy = ac.evaluate(model, prompts).where(predictor="model", metric="accuracy", kind="all", offset=None)
    assert 1 - wrong / len(prompts.targets) == pytest.approx(float(accuracy.frame["value"].iloc[0]))
    assert wrong < other, "letters that the automaton accepts beside the target's own are right"


def test_it_draws_a_relation_of_the_users_own(planted):
    model, prompts = planted
    own = ac.Relation.from_pairs([(0, 9, [4]), (0, 12, [6, 7])], prompts=prompts)
    # as `Prompts.from_jsonl` adds those of a file, behind the relations that need nothing but the ids
    three = {name: prompts.relations[name] for name in ("induction", "previous", "duplicate")}
    prompts = replace(prompts, relations=three)
    explorer = ac.explore(model, prompts.with_relations(mine=own))
    assert explorer.choices["relations"] == ["mine", *three]
    assert prompts.with_relations(mine=own).to_html(0, relation="mine") in explorer.shown
    assert "Relation: mine" in explorer.shown and "of its attention is on the framed keys" in explorer.shown
    explorer.prompt = 1
    assert "This prompt has no row of mine." in explorer.shown


def chances(page: str, columns: int = 1) -> list[list[float]]:
    """The probabilities in the table of answers, a list a target."""
    # not the heading, which has a style
    rows = re.findall(r"<tr>(.*?)</tr>", page.split("Answers")[1], flags=re.DOTALL)
    cells = [[html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]
    return [[float(row[2 * column + 2]) for column in range(columns)] for row in cells]


def intact_and_ablated(explorer, prompt: int) -> list[float]:
    """The mean probability of a prompt's targets."""
    explorer.prompt = prompt
    return torch.tensor(chances(explorer.shown, columns=2)).mean(0).tolist()


@pytest.mark.parametrize(
    ("trait", "value", "message"),
    [
        ("prompt", 8, "prompt=8: give 0 to 7"),
        ("row", -1, "give 0 or more"),
        ("relation", "gold", "choose from align_query, "),
        ("head", "L9H9", "head L9H9: choose from L0H0"),
        ("ablated", ["L9H9"], "head L9H9: choose from L0H0"),
    ],
)
def test_a_wrong_choice_is_refused_and_changes_nothing(planted, trait, value, message):
    explorer = ac.explore(*planted)
    before = explorer.shown, getattr(explorer, trait)
    refused(message, setattr, explorer, trait, value)
    assert (explorer.shown, getattr(explorer, trait)) == before


def test_prompts_that_have_nothing_to_explore_are_refused(planted):
    model, prompts = planted
    with pytest.raises(KeyError, match="no relation 'gold' in these prompts; they have align_query"):
        ac.explore(model, prompts, relations=["gold"])
    refused("nothing to explore: give prompts with targets", ac.explore, model, prompts, relations=[])
    refused("relations such as induction, and heads", ac.explore, model, prompts, heads=[])
    explorer = ac.explore(model, prompts.select_targets(lambda target: target["prompt"] > 0))
    assert "This prompt has no target." in explorer.shown
    explorer.prompt = 1
    assert len(chances(explorer.shown)) == len(prompts[1].targets)
    refused("no head L9H9", ac.explore, model, prompts, heads=["L9H9"])


def test_without_anywidget_it_says_what_to_install(planted, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    raised(ImportError, re.escape("pip install 'align-circuits[notebook]'"), ac.explore, *planted)


def test_a_page_without_a_kernel_shows_the_first_view(planted, monkeypatch):
    explorer, outputs = ac.explore(*planted), []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: outputs.append(data))
    explorer._ipython_display_()
    page, widget = outputs
    assert explorer.shown in page["text/html"]
    assert set(page) == {"text/html", "text/plain"}, "nbconvert would take a widget from a server before the page"
    assert widget["application/vnd.jupyter.widget-view+json"]["model_id"] == explorer.model_id
    assert repr(explorer) == "Explorer(prompt 0 of 8, L0H0, align_query)"


def test_its_controls_set_the_traits_in_a_browser(planted, tmp_path):
    explorer = ac.explore(*planted)
    names = ("prompt", "relation", "row", "head", "ablated", "choices", "shown")
    traits = json.dumps({name: getattr(explorer, name) for name in names} | {"stand_in": "first"}).replace(
        "<", "\\u003c"
    )
    code = files("align_circuits.report").joinpath("templates/explorer.js").read_text(encoding="utf-8")
    page = tmp_path / "page.html"
    code = code.replace("export default {render}", "const widget = {render}")
    page.write_text(PAGE.replace("CODE", code).replace("TRAITS", traits), encoding="utf-8")
    seen, console = browser.ran(page, tmp_path, USE)
    assert console == []
    assert seen["beside"] is None, "the page that stands in where no kernel is"
    assert "is on the framed keys" in seen["first"]
    chosen = [["head", "L3H2"], ["row", 2], ["ablated", ["L3H2"]], ["relation", "lookup"], ["prompt", 4]]
    assert [each for each in seen["saved"] if each != "saved"] == chosen and seen["saved"].count("saved") == 5
    assert seen["prompt"] == "4", "there is no prompt 99"
    assert (seen["checked"], seen["status"], seen["page"]) == (True, "ablated: L3H2", "the next page")
    assert seen["labels"] == ["prompt", "relation", "query", "head", "ablate this head"]
    assert seen["left"] == 0
