"""Which packages there are: this folder as `ggufmill`, and the folders below it that have an `__init__.py`."""

if __name__ == "__main__":
    from setuptools import find_packages, setup

    outside = ("tests", "benchmarks", "docs", "build", "out")
    below = find_packages(exclude=[pattern for name in outside for pattern in (name, f"{name}.*")])
    setup(script_name="setup.py", packages=["ggufmill", *(f"ggufmill.{name}" for name in below)])
