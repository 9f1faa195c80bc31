"""`tq-service plan`: reads lengths, shows what each sampler would do, draws it."""

import numpy as np
import pytest
from typer.testing import CliRunner

from tq_service.cli import app
from tq_service.cli.plan import Shape, preview_samplers

LENGTHS = [900, 800, 300, 250, 150, 100]


def shape(**changes):
    defaults = {"dp_size": 2, "optimizer_steps": 1, "pack_max_length": 1000, "n_samples_per_prompt": 1}
    return Shape(**{**defaults, "tokens_per_rank": 1000, "overlong": "error", **changes})


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def lengths_file(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)) + "\n\n")
    return path


def test_previews_are_what_the_samplers_do():
    previews = {preview.sampler: preview for preview in preview_samplers(np.array(LENGTHS), shape())}
    tokens = {name: preview.rank_tokens.tolist() for name, preview in previews.items()}
    assert tokens["sequential"] == [2000, 500]
    assert tokens["rank_aware"] == [1350, 1150]
    assert tokens["seqlen_balanced"] == tokens["packed"] == [1250, 1250]
    assert sorted(tokens["token_budget"]) == [800, 900]
    assert previews["token_budget"].batches == 2
    assert previews["packed"].packs_by_step == [2]
    assert previews["packed"].pack_fills.sum() == pytest.approx(2.5)
    assert previews["sequential"].pack_fills is None


def test_groups_stay_whole():
    previews = preview_samplers(np.array(LENGTHS), shape(n_samples_per_prompt=3, tokens_per_rank=2000))
    assert all(sorted(preview.rank_tokens.tolist()) == [500, 2000] for preview in previews)


def test_more_ranks_than_samples():
    previews = preview_samplers(np.array([5]), shape(dp_size=3, optimizer_steps=2))
    assert all(sorted(preview.rank_tokens.tolist()) == [0, 0, 5] for preview in previews)


def test_a_table_of_a_text_file(lengths_file):
    result = plan("--lengths", lengths_file, "--dp-size", 2, "--pack-max-length", 1000)
    assert result.exit_code == 0, result.output
    assert "6 samples of 100 to 900 tokens, 2,500 in total; 2 ranks, packs of 1,000 tokens" in result.stdout
    rows = {line.split("  ")[0]: line.split() for line in result.stdout.splitlines() if line}
    assert rows["sequential"][1:6] == ["1", "3", "2,000", "60.00%", rows["sequential"][5]]
    assert rows["packed"][1:5] == ["1", "3", "1,250", "0.00%"]
    assert rows["packed"][6:] == ["4", "37.50%", "2"]


def test_columns_of_a_csv_file_are_added_up(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time,prompt,response\n0,10,5\n1,20,7\n2,1,1\n")
    result = plan("--lengths", path, "--column", "prompt", "--column", "response", "--limit", 2)
    assert result.exit_code == 0, result.output
    assert "2 samples of 15 to 27 tokens, 42 in total" in result.stdout


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("a,b\n1,2\n", [], "line 1: got 'a,b', expected a token count of at least 0; select CSV columns"),
        ("5\n-3\n", [], "line 2: got '-3'"),
        ("a,b\n1,2\n", ["--column", "c"], "got 'c', expected one of a, b"),
        ("a,b\n1\n", ["--column", "b"], "line 2, column b: got ''"),
        ("", [], "contains no lengths"),
        ("5\n9\n", ["--pack-max-length", "8"], "got 9 for sample 1, expected at most pack_max_length (8)"),
        ("5\n9\n", ["--tokens-per-rank", "8"], "got 9 tokens for sample 1, expected at most tokens_per_rank (8)"),
    ],
)
def test_files_and_options_that_do_not_fit_are_usage_errors(tmp_path, text, arguments, message):
    path = tmp_path / "lengths"
    path.write_text(text)
    result = plan("--lengths", path, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path):
    result = plan("--lengths", tmp_path / "none")
    assert result.exit_code == 2
    assert "could not read" in result.output


@pytest.mark.parametrize(("content", "columns"), [("5\n7\n", ()), ("tokens\n5\n7\n", ("--column", "tokens"))])
def test_a_byte_order_mark_is_not_part_of_a_file(tmp_path, content, columns):
    path = tmp_path / "excel.csv"
    path.write_text(content, encoding="utf-8-sig")
    result = plan("--lengths", path, *columns, "--dp-size", 2)
    assert result.exit_code == 0, result.output
    assert "2 samples of 5 to 7 tokens, 12 in total" in result.output
