"""Collections of second moments that are killed in the middle of a step, and resumed."""

from ggufmill.imatrix.collect_state import CollectState
from ggufmill.imatrix.covariance.job import CovarianceJob
from ggufmill.imatrix.covariance.writer import CovarianceWriter

STEPS = [
    (CovarianceJob, "prepare_state"),
    (CovarianceJob, "commit_state"),
    (CollectState, "save"),
    (CovarianceWriter, "write"),
    (CovarianceWriter, "sync"),
    (CovarianceWriter, "finish"),
]


class Killed(Exception):
    pass


def collect_though_killed(monkeypatch, owner, step, path, collect):
    """Calls collect(resume) until it ends: killed before the first call of a step, after the third, and before the sixth, and
    resumed each time. path: of the file, which has its name when it is complete, and not before."""
    original, calls, kills = getattr(owner, step), 0, 0

    def killed(self, *arguments):
        nonlocal calls
        calls += 1
        if calls in (1, 6):
            raise Killed
        original(self, *arguments)
        if calls == 3:
            raise Killed

    monkeypatch.setattr(owner, step, killed)
    for attempt in range(4):
        try:
            collect(attempt > 0)
            break
        except Killed:
            kills += 1
            assert not path.exists() or step == "finish"
    assert kills
