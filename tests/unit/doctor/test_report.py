import json
from dataclasses import replace

from async_grpo.doctor.report import Report, Verdict, fail, ok, skipped
from async_grpo.errors import ExitCode

OK = ok("packing", "a packed sequence changes its neighbor by 0", {"leak": 0.0})
BAD = fail("weights", "the checksum did not change with the weights", "compare names")


def test_exit_codes_tell_a_failure_from_an_absent_engine():
    assert Report([OK, skipped("text", "ids only")]).exit_code is ExitCode.OK
    assert Report([OK, BAD]).exit_code is ExitCode.OTHER
    assert Report([OK, BAD], unreachable=True).exit_code is ExitCode.PEER


def test_the_text_has_a_line_for_each_check_and_advice_below_a_failure():
    report = Report([OK, replace(BAD, engine="http://127.0.0.1:1")])
    assert report.to_text().splitlines() == [
        "ok      packing           a packed sequence changes its neighbor by 0",
        "engine http://127.0.0.1:1",
        "FAIL    weights           the checksum did not change with the weights",
        "                          -> compare names",
        "1 ok, 1 FAIL, 0 skipped",
    ]


def test_json_holds_every_figure():
    told = json.loads(json.dumps(Report([OK, BAD]).to_json()))
    assert not told["ok"]
    assert [check["verdict"] for check in told["checks"]] == ["ok", "fail"]
    assert told["checks"][0]["values"] == {"leak": 0.0}
    assert told["checks"][1]["advice"] == "compare names"
    assert {verdict.value.lower() for verdict in Verdict} == {"ok", "fail", "skipped"}
