import pytest

from tests import command


@pytest.fixture
def learn(tmp_path, monkeypatch):
    """A function that runs `numdiff learn` and gives its exit code and what it prints."""
    monkeypatch.setenv("NUMDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(words=""):
        result = command.run("learn", words)
        return result.exit_code, result.output

    return run
