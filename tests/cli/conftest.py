"""The command line, run in this process."""

import pytest

from ggufmill.cli import main


@pytest.fixture
def mill(capsys):
    """Runs the command line here; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run
