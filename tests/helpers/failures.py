"""What holds of every job that failed."""


def error_line(result, out):
    """The one line of an error, after checking what holds for every failure."""
    code, _, err = result
    assert code == 1
    line = err.splitlines()[-1]
    assert line.startswith("ggufmill: ")
    assert "internal error" not in line
    assert "Traceback" not in err
    assert not out.exists()
    return line
