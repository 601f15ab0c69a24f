import base64
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kdgen.errors import SpecError, ToolchainError, UsageError
from kdgen.spec import load_spec
from kdgen.sweep.apply import apply, changed_params, default_path
from kdgen.sweep.choose import by_configuration
from kdgen.sweep.recorded import document_of, read_recorded
from kdgen.sweep.report import shown_values, write_report
from kdgen.sweep.run import Budget, Sweep
from kdgen.sweep.search import make_strategy
from kdgen.sweep.stages import WHOLE
from kdgen.sweep.store import Store
from tests.sweep.fakes import PLACE, FakeCompiler, load_small
from tests.sweep.test_run import Direct

pytest.importorskip("matplotlib")


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """A directory with a measured sweep in which everything that can happen has happened."""
    monkeypatch.setattr("kdgen.sweep.run.publish", lambda kernels, target, out: None)
    space = "  stages: [2, 4, 6, 7, 8]\n  slices: [1, 2, 4]\n  few_rows: {values: [0, 8], when: 'slices > 1', otherwise: 0}\n"
    spec, shapes = load_small(tmp_path, space, constraints="  - {need: 'stages + slices < 12', why: 'a <b>bold</b> reason'}\n")
    with Store(tmp_path / "out") as store:
        floors = {shape.name: 1.0 for shape in shapes}
        store.describe(PLACE, spec.name, "sm_90", document_of(spec, shapes, floors, {"read": 4.6e12, "mma": 6.4e14}))
        sweep = Sweep(spec, shapes, store, PLACE, FakeCompiler(spills=6), worker=Direct())
        sweep.run(make_strategy("grid", spec.space, 0, None), Budget(), 8)
        sweep.close()
    return tmp_path / "out"


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open, self.tags = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.found += [value for name, value in attributes if name in ("src", "href", "action", "data", "srcset", "poster")]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_asks_for_nothing_from_outside(stored):
    with Store(stored, read_only=True) as store:
        recorded = read_recorded(store)
    path = write_report(recorded, stored)
    text = path.read_text()
    links = Links()
    links.feed(text)
    assert not links.open, "every element is closed"
    assert links.found
    assert all(link.startswith("data:image/png;base64,") for link in links.found)
    assert not {"script", "link", "iframe", "object"} & links.tags
    assert not re.search(r"https?:|url\(|@import", text)
    for link in links.found:
        assert base64.b64decode(link.partition(",")[2]).startswith(b"\x89PNG\r\n")
    for section in ("Choice", "Best per shape", "Ranking", "Turned down, and why", "Predicted and measured", "Pairs of parameters"):
        assert f"<h2>{section}" in text
    assert "a &lt;b&gt;bold&lt;/b&gt; reason" in text
    assert "an illegal memory access" in text
    assert "want 2.0" in text
    assert "4,600 GB/s" in text
    assert re.search(r"While timing: 1,755–1,755 MHz, up to 61 °C, throttled after (\d+) of \1 timings: power cap", text)
    names = {item.stem for item in stored.glob("*.png")}
    assert {"best", "floor", "stages", "predicted", "pair-stages-slices"} <= names


def test_the_same_results_give_the_same_report(stored):
    with Store(stored, read_only=True) as store:
        recorded = read_recorded(store)
    first = write_report(recorded, stored / "a").read_bytes()
    assert write_report(recorded, stored / "b").read_bytes() == first


def test_pictures_need_matplotlib(stored, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Store(stored, read_only=True) as store, pytest.raises(ToolchainError, match=r"pip install 'kdgen\[sweep\]'"):
        write_report(read_recorded(store), stored)


def test_a_choice_becomes_a_spec_on_top_of_the_base(stored, tmp_path):
    with Store(stored, read_only=True) as store:
        recorded = read_recorded(store)
    path = tmp_path / "tuned" / "sm_90" / "small.yaml"
    choice, spec = apply(recorded, path)
    text = path.read_text()
    assert 'base: "../../small.yaml"' in text
    assert "measured on a GPU" in text
    assert spec.targets == ("sm_90",)
    params = load_spec(path).kernels[0].params.model_dump(mode="json")
    base = load_spec(tmp_path / "small.yaml").kernels[0].params.model_dump(mode="json")
    assert params == {**base, **choice.values}
    assert [line for line in text.splitlines() if line.startswith("  ")] == [
        f"  {name}: {value}" for name, value in choice.values.items() if base[name] != value
    ]
    assert list(path.parent.iterdir()) == [path]
    few, _ = apply(recorded, tmp_path / "few.yaml", "few")
    assert few.bucket == "few"
    with pytest.raises(UsageError, match="nothing to choose for bucket 'some'; there are: all, few, many"):
        apply(recorded, path, "some")
    assert default_path(recorded, "few") == Path("specs/tuned/sm_90/small-few.yaml")


def test_a_base_that_has_changed_leaves_the_tuned_spec_as_it_was(stored, tmp_path):
    with Store(stored, read_only=True) as store:
        recorded = read_recorded(store)
    path = tmp_path / "tuned.yaml"
    apply(recorded, path)
    before = path.read_bytes()
    small = tmp_path / "small.yaml"
    small.write_text(small.read_text().replace('"k": 2048', '"k": 64'))
    with pytest.raises(SpecError):
        apply(recorded, path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_only_what_differs_is_written_and_bits_are_mentioned():
    params = {"tile": {"n": 64, "k": 64}, "launches": [{"rows": 2, "stages": 2}, {"rows": 8, "stages": 4}], "warps": 8}
    assert changed_params(params, {"tile.n": 64, "warps": 8}) == {}
    assert changed_params(params, {"tile.n": 32, "launches.1.stages": 5}) == {
        "tile": {"n": 32}, "launches": [{"rows": 2, "stages": 2}, {"rows": 8, "stages": 5}],
    }  # fmt: skip


def test_a_change_of_bits_is_said(stored, tmp_path):
    with Store(stored, read_only=True) as store:
        recorded = read_recorded(store)
    choice, _ = apply(recorded, tmp_path / "tuned.yaml")
    said = "Decides other bits than the base: slices" in (tmp_path / "tuned.yaml").read_text()
    assert said == (choice.values["slices"] != recorded.params["slices"])
    rows = by_configuration(recorded.rows)
    assert shown_values(recorded, rows[recorded.incumbent][WHOLE].values) == "as the base spec"
    assert recorded.pinned


def test_several_stored_sweeps_must_be_told_apart(stored):
    from dataclasses import replace

    with Store(stored) as store:
        place, name, target, document = store.sweeps()[0]
        store.describe(replace(place, device="none (sm_90)"), name, target, document)
        with pytest.raises(UsageError, match="2 stored sweeps are what --name, --arch and --on select; stored are: small on a GPU"):
            read_recorded(store)
        assert read_recorded(store, device="a GPU").measured
        store.describe(replace(place, spec="t" * 64), name, target, document)
        assert read_recorded(store, device="a GPU").place.spec == "t" * 64, "the one that was run last"
        store.describe(place, name, target, document)
        assert read_recorded(store, device="a GPU").measured
        with pytest.raises(UsageError, match="no stored sweep is"):
            read_recorded(store, name="other")
