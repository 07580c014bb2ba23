"""In how many files a function receives or returns an object, while a small model is planned and
trained."""

import pytest

from benchmarks.walks import ROOT, as_markdown, trace

MAX_FILES = {"HardwareProfile": 16, "Candidate": 15, "caption": 5, "model name": 6}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_objects_walk_through_few_files(tmp_path):
    walks = trace(tmp_path)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert as_markdown(walks) in page, "write them anew: python benchmarks/walks.py --write"
    assert [kind for kind, files in walks.items() if len(files) > MAX_FILES[kind]] == []
