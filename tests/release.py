"""Walks the checklist of a release: what can be checked is checked, what a person must do is printed at the end.

    python tests/release.py                    # make release: under Python 3.11, 3.12 and 3.13
    python tests/release.py --pythons 3.11

The wheel is installed with its dependencies, away from the checkout, under every Python that is found here, and used
there; the sdist is built into a wheel of the same files. Nothing is uploaded and nothing tagged.
"""

# ruff: noqa: T201
import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCH = "torch==2.13.0"
"""Installed first and exactly: a range may fetch the newest build with its CUDA libraries."""


class Failed(Exception):
    """A point of the checklist does not hold; its message says why."""


def ran(*command: str | Path, folder: Path = ROOT) -> str:
    """Returns what a command prints."""
    done = subprocess.run([str(word) for word in command], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{command[0]}: {(done.stderr or done.stdout).strip()[-600:]}")
    return done.stdout


def found(pattern: str, text: str, where: str) -> str:
    """Returns the first group of a pattern."""
    if (match := re.search(pattern, text, re.MULTILINE)) is None:
        raise Failed(f"{where} has nothing like {pattern!r}")
    return match[1]


def one_version() -> str:
    """The version of pyproject.toml is that of CITATION.cff and of the first heading of the changelog, with a date."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    cited = found(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), "CITATION.cff")
    logged = found(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), "CHANGELOG.md")
    if cited != version or not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", logged):
        raise Failed(f"pyproject.toml says {version}, CITATION.cff {cited}, CHANGELOG.md {logged!r}")
    return version


def committed() -> str:
    """Nothing is uncommitted, and the version has no tag yet."""
    if changed := ran("git", "status", "--porcelain").strip():
        raise Failed(f"uncommitted: {changed.splitlines()[0]}")
    if ran("git", "tag", "--list", tag := f"v{one_version()}").strip():
        raise Failed(f"{tag} exists")
    return f"commit {ran('git', 'rev-parse', '--short', 'HEAD').strip()}"


def built(folder: Path) -> str:
    """Wheel and sdist are built, and a wheel built from the sdist holds the same files."""
    ran(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ".")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    ran(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", folder / "again", ".", folder=source)
    (again,) = (folder / "again").glob("*.whl")
    names = [set(zipfile.ZipFile(file).namelist()) for file in (wheel, again)]
    if names[0] != names[1]:
        raise Failed(f"the wheel of the sdist differs: {sorted(names[0] ^ names[1])[:3]}")
    return f"{wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB; {sdist.name}, {sdist.stat().st_size / 1e6:.1f} MB"


def used(python: Path, folder: Path) -> str:
    """The wheel is installed with its dependencies into a new environment, as pip and pipx do, and used."""
    (wheel,) = folder.glob("*.whl")
    place = folder / f"env-{python.name}-{abs(hash(python))}"
    ran(python, "-m", "venv", place)
    constraints = ROOT / "constraints.txt"
    ran(place / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", constraints, TORCH)
    ran(place / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", constraints, wheel)
    program = place / "bin" / "align-circuits"
    said = ran(program, "--version", folder=folder).strip()
    if one_version() not in said:
        raise Failed(f"--version says {said!r}")
    ran(
        program,
        "localize",
        "--model",
        "sparse-gpt2",
        "--n",
        "16",
        "--n-controls",
        "1",
        "--out",
        place / "run",
        folder=folder,
    )
    if not (place / "run" / "report.html").is_file():
        raise Failed("localize wrote no report")
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    shutil.rmtree(place)
    return f"{said}; localize wrote its report; {size / 1e9:.1f} GB with dependencies"


def interpreters(versions: Sequence[str]) -> Iterator[tuple[str, Path | None]]:
    """Where each version of Python is installed, or None."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in versions:
        places = [*sorted(home.glob(f"{version}.*/bin/python")), *([path] if (path := _on_path(version)) else [])]
        yield version, places[-1] if places else None


def _on_path(version: str) -> Path | None:
    """A Python on the path that starts: a launcher may be there though the version behind it is not selected."""
    path = shutil.which(f"python{version}")
    works = path and subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0
    return Path(path) if path and works else None


def main() -> int:
    """Walks the list; returns 1 if a point fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", nargs="+", default=["3.11", "3.12", "3.13"])
    arguments = parser.parse_args()
    failed = False

    def point(name: str, check: Callable[[], str]) -> None:
        nonlocal failed
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Failed as error:
            failed = True
            print(f"FAIL  {name}: {error}", flush=True)

    os.environ["HF_HUB_OFFLINE"] = "1"
    point("one version", one_version)
    point("committed", committed)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        point("built", lambda: built(folder))
        for version, python in interpreters(arguments.pythons):
            if python is None:
                print(f"--    Python {version}: not installed here, not tried")
            else:
                point(f"Python {version}", lambda python=python: used(python, folder))
    print(
        "\nBy hand: `make check` and, where there is a GPU, `make gpu` on this commit; read CHANGELOG.md as a user; "
        "look at the documentation and at the report of `make demo`; then push the tag, approve the "
        "deployment of .github/workflows/release.yml, and try `pipx run align-circuits --version` once it is done."
    )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
