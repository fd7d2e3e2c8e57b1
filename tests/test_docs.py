"""Every snippet and command of README and docs runs, every option is documented, and the site is
built without the network.

Python blocks of a page run in order in one namespace; `title="file.py"` writes the block to a file.
Commands of `decisionllm` run with few steps and episodes. A block after `<!-- compose only -->`
needs a GPU, a network or long training: its commands are composed only. A Python block after `<!--
needs a server ... -->` is run by another test. Commands of the lab's tables are composed, none is run.
"""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.errors import HydraException
from omegaconf import OmegaConf

from decisionllm import PUBLIC
from decisionllm.__main__ import COMMANDS, dispatch, with_action
from decisionllm.command_line import config_folder, store_choices
from decisionllm.config import TrainConfig
from decisionllm.sweep import run_directory, swept_keys
from tests.conftest import command
from tests.test_layers import FLOORS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LAB = sorted((ROOT / "lab").glob("*.md"))
COMPOSED = [*PAGES, *(page for page in LAB if page.name != "LOG.md")]  # the LOG is history
BLOCK = re.compile(
    r"(<!-- (?:compose only|needs a server)[^\n]*-->\n)?^```(python|sh)(?: title=\"(.*?)\")?\n(.*?)^```$",
    re.M | re.S,
)
IMPORTED = re.compile(r"^ *from (decisionllm[\w.]*) import (.*)$", re.M)
TITLE = re.compile(r'title="(.*?)"')
OF_A_USER = re.compile(
    r"\b(?:my\w+|run_test|seat_player|reach)\.py\b"
)  # of AuctionNet, of a reader
SOURCES = ("decisionllm", "tests", "lab", "benchmarks", "examples", "docs")
INLINE = re.compile(rf"`decisionllm ((?:{'|'.join(COMMANDS)}) [^`\n<]*=[^`\n<]*)`")
LAUNCHED = re.compile(r"accelerate launch .* -m (?=decisionllm )")
FROM_INDEX = re.compile(
    r"decisionllm\[[a-z]|(pip install|uv add|uvx) [^`\n]*(?<![/\w.-])decisionllm(?![/\w.-])"
)
SWEPT = re.compile(r"[\w.]+=[^\[,]+,")
FEW = {
    r"(?<![.\w])steps=\d+": "steps=2",
    r"(?<![.\w])(?<!synthetic\", )episodes=\d+": "episodes=3",
}
QUICK = ("optim.batch_size=8", "log.tracker=none", "log.validation_batches=1", "optim.warmup=2")
FIRST = (
    "dataset=synthetic",
    "dataset.episodes=2000",
    "text=goal",
    "backbone=nano",
    "window=4",
    "steps=2",
    "run=runs/first",
    *QUICK,
)
PRIVATE = (
    "told",
    "untold",
    "asked",
    "nobody",
    "desk",
    "trunk",
    "crew",
    "reachable",
    "courses",
    "whoever",
)


def name(path):
    return path.stem


def blocks(page):
    """(composed only, language, file name, text) of each block of a page."""
    return [
        (bool(mark), kind, title, text)
        for mark, kind, title, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def lines(text):
    """The commands of a shell block, continued lines joined, comments cut off."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [
        line for each in joined.splitlines() if (line := re.sub(r"\s+#.*$|^#.*$", "", each).strip())
    ]


def commands(page):
    """Every `decisionllm COMMAND ...` of a page as words -> whether a block runs it."""
    run_by_words = {}
    for composed, kind, _, text in blocks(page):
        for launched in lines(text) if kind == "sh" else ():
            line = LAUNCHED.sub("", launched)
            if line.startswith("decisionllm "):
                words = line.removeprefix("decisionllm ")
                run_by_words[words] = (
                    run_by_words.get(words, False) or not composed and runs(launched)
                )
    run_by_words = (
        dict.fromkeys(INLINE.findall(page.read_text(encoding="utf-8")), False) | run_by_words
    )
    return {tuple(shlex.split(words)): run for words, run in run_by_words.items()}


def runs(line):
    """Return whether a line of a shell block is run; lines that only print are composed."""
    return line.startswith("decisionllm ") and not {"--help", "--cfg"} & {*shlex.split(line)}


def single(words):
    """The words without sweeps: one value each."""
    if "--multirun" not in words:
        return words
    return [re.sub(r"^([\w.]+=[^\[,]+),.*$", r"\1", word) for word in words if word != "--multirun"]


def two_jobs(words):
    """The words of a sweep with its first two jobs: two values of the last swept option, one of the
    others.
    """
    swept = [i for i, word in enumerate(words) if SWEPT.match(word)]
    alone = [
        word if i == swept[-1] else single(["--multirun", word])[0]
        for i, word in enumerate(words)
        if word != "--multirun"
    ]
    return ["--multirun", *(re.sub(r"^([\w.]+=[^\[,]+,[^,]+),.*$", r"\1", word) for word in alone)]


def few(text):
    for pattern, replacement in FEW.items():
        text = re.sub(pattern, replacement, text)
    return text


def run_line(line):
    """Run one line of a shell block in this process, with few steps."""
    words = shlex.split(few(line))
    if not runs(line):
        return check_line(line)
    verb, *overrides = two_jobs(words[1:]) if "--multirun" in words else words[1:]
    more = [word for word in QUICK if word.partition("=")[0] not in line] if verb == "train" else []
    assert command(verb, *overrides, *more) == 0, line


def check_line(line):
    """`make` targets and benchmark modules exist; other lines are for the reader's machine, and
    commands are composed by another test.
    """
    program, *targets = line.split()
    if program == "make":
        assert all(
            re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            for target in targets
        ), line
    for module in re.findall(r"python -m ((?:benchmarks|lab)\.\w+)", line):
        assert importlib.util.find_spec(module), line


def compose(words):
    if "--help" in words:
        assert command(*words) == 0
        return
    verb, *overrides = single(words)
    if any(word.startswith("-") for word in overrides):
        assert command(verb, *overrides, "--cfg", "job") == 0, " ".join(words)
        return
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        hydra.compose(verb, with_action(verb, overrides))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The run directory of the quick start, trained for two steps."""
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DECISIONLLM_HOME", str(folder / "data"))
        assert command("train", *FIRST) == 0
    return folder / "runs" / "first"


@pytest.fixture
def scratch(first_run, tmp_path, monkeypatch):
    """A folder with runs/first, from which modules are imported."""
    folder = tmp_path / "scratch"
    shutil.copytree(first_run, folder / "runs" / "first")
    monkeypatch.setattr("decisionllm.models.inverse_dynamics.BATCH", 16)  # of 1,000 updates
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_the_blocks_of_a_page_run(page, scratch, capsys):
    namespace = {"__name__": page.stem}
    for composed, kind, title, text in blocks(page):
        if title:
            Path(title).write_text(text, encoding="utf-8")
        elif kind == "python" and not composed:
            exec(compile(few(text), f"{page.name}", "exec"), namespace)
        elif kind == "sh":
            for line in lines(text):
                check_line(line) if composed else run_line(line)


@pytest.mark.slow
def test_every_command_composes(capsys):
    """Compose the commands that no block runs."""
    store_choices()
    wrong, run_by_words = [], {}
    for page in COMPOSED:
        run_by_words |= {
            words: run or run_by_words.get(words, False) for words, run in commands(page).items()
        }
    for words in (words for words, run in run_by_words.items() if not run):
        try:
            compose([word for word in words if word not in ("--cfg", "job")])
        except (AssertionError, HydraException) as error:
            wrong.append(f"{shlex.join(words)}: {error} {capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_the_jobs_of_a_sweep_have_run_directories_of_their_own():
    store_choices()
    wrong = []
    for words in {words for page in COMPOSED for words in commands(page) if "--multirun" in words}:
        _, verb, *overrides = two_jobs(list(words))
        key, values = next(word for word in reversed(overrides) if SWEPT.match(word)).split("=")
        folders = []

        def add_folders(config, overrides=overrides, key=key, values=values, folders=folders):
            for value in values.split(","):
                OmegaConf.update(config, key, yaml.safe_load(value))
                folders.append(run_directory(config, swept_keys(overrides), [f"{key}={value}"]))

        first = values.split(",")[0]
        dispatch(verb, [word.replace(values, first) for word in overrides], add_folders)
        if len(set(folders)) != 2:
            wrong.append(f"{shlex.join(words)}: run directories {folders}")
    assert not wrong, "\n".join(wrong)


def test_every_command_is_documented():
    assert {words[0] for page in PAGES for words in commands(page)} == set(COMMANDS)


def test_the_scripts_that_the_lab_names_exist():
    for page in LAB:
        for module in re.findall(r"python -m (lab\.[a-z]\w*)", page.read_text(encoding="utf-8")):
            assert importlib.util.find_spec(module), f"{page.name}: {module}"
    table = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")
    scripts = {path.stem for path in (ROOT / "lab").glob("*.py")} - {"__init__", "played"}
    assert not scripts - set(re.findall(r"`(\w+)`", table))


def test_local_links_lead_somewhere():
    wrong = []
    for page in [*PAGES, *LAB, ROOT / "CHANGELOG.md", ROOT / "lab" / "studies" / "README.md"]:
        targets = re.findall(
            r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")
        )
        wrong += [
            f"{page.name}: {target}" for target in targets if not (page.parent / target).exists()
        ]
    assert not wrong, "\n".join(wrong)


def defined_names(path):
    """Return the names at the top level of a module, imported ones among them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return names


def is_defined(words):
    """Return whether ["decisionllm", folder, ..., module, name, ...] names a module or what is in
    it.
    """
    for length in range(len(words), 0, -1):
        path = ROOT.joinpath(*words[:length])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.is_file():
            rest = words[length:]
            if words[:length] == ["decisionllm"]:
                return not rest or rest[0] in PUBLIC or rest[0] in defined_names(source)
            return set(rest[:1]) <= defined_names(source)
    return False


def missing_files(page, text):
    """Return the Python files that a page names, but neither the repository nor the page has."""
    in_repository = {path.name for folder in SOURCES for path in (ROOT / folder).rglob("*.py")}
    of_user = set(TITLE.findall(text)) | set(OF_A_USER.findall(text))
    missing = []
    for path in sorted(set(re.findall(r"(?<![\w./{-])([\w./-]*\w\.py)\b", text)) - of_user):
        if "NAME" in path:  # such as worlds/NAME/env.py
            continue
        if "/" not in path:
            exists = path in in_repository
        else:
            exists = any((at / path).is_file() for at in (ROOT, ROOT / "decisionllm", page.parent))
        if not exists:
            missing.append(path)
    return missing


def test_a_page_names_files_and_modules_that_exist():
    wrong = []
    folders = sorted(path.name for path in (ROOT / "decisionllm").iterdir() if path.is_dir())
    short = re.compile(rf"`((?:{'|'.join(folders)})(?:\.\w+){{2,}})(?:\(.*?\))?`")
    for path in sorted((ROOT / "decisionllm").rglob("*.py")):
        names = [f"decisionllm.{name}" for name in short.findall(path.read_text(encoding="utf-8"))]
        wrong += [f"{path.name}: {name}" for name in names if not is_defined(name.split("."))]
    package = ROOT / "decisionllm" / "__init__.py"
    for page in [*COMPOSED, ROOT / "AGENTS.md", *(ROOT / "lab" / "studies").glob("*.md"), package]:
        text = page.read_text(encoding="utf-8")
        dotted = set(re.findall(r"(?<![\w./])decisionllm(?:\.[a-zA-Z]\w*)+(?!\.?\w)", text))
        dotted |= {f"decisionllm.{name}" for name in short.findall(text)}
        for module, names in IMPORTED.findall(text):
            dotted |= {f"{module}.{name}" for name in re.findall(r"\w+", names)}
        wrong += [f"{page.name}: {name}" for name in dotted if not is_defined(name.split("."))]
        wrong += [f"{page.name}: {path}" for path in missing_files(page, text)]
    assert not wrong, "\n".join(sorted(wrong))


def anchors(page):
    """The anchors of the headings of a page."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_links_into_a_page_of_the_lab_have_a_heading():
    """Links within docs are checked when the site is built."""
    wrong = []
    for page in [*PAGES, *LAB, ROOT / "lab" / "studies" / "README.md"]:
        links = re.findall(r"\]\(((?!http)[^)#\s]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
        for target, anchor in links:
            other = (page.parent / target).resolve() if target else page
            if ROOT / "lab" in other.parents and anchor not in anchors(other):
                wrong.append(f"{page.name}: {target}#{anchor}")
    assert not wrong, "\n".join(wrong)


def test_a_page_uses_the_words_of_the_field():
    wrong = []
    for page in PAGES:
        words = re.findall(rf"\b({'|'.join(PRIVATE)})\b", page.read_text(encoding="utf-8"), re.I)
        wrong += [f"{page.name}: {word}" for word in words]
    assert not wrong, "\n".join(wrong)


def test_a_paragraph_has_at_most_four_sentences():
    wrong = []
    for page in PAGES:
        prose = re.sub(
            r"```.*?```|^\|.*$|^#.*$|^:::.*$|^ {4}.*$",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.M | re.S,
        )
        for paragraph in re.split(r"\n\s*\n|\n(?=- |\d\. )", prose):
            if len(re.findall(r"[a-z)%`][.?!](?:\s|$)", paragraph)) > 4:
                wrong.append(f"{page.name}: {paragraph}")
    assert not wrong, "\n".join(wrong)


def test_the_floors_of_the_architecture_are_those_of_the_imports():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [
        set(re.findall(r"`(\w+)/?`", row)) for row in re.findall(r"^\| \d+ \| (.*?) \|", text, re.M)
    ]
    assert [floor - {"__init__"} for floor in FLOORS] == rows


def options(cls=TrainConfig, at=""):
    for field in fields(cls):
        made = field.default_factory() if callable(field.default_factory) else None
        if is_dataclass(made):
            yield from options(type(made), f"{at}{field.name}.")
        else:
            yield f"{at}{field.name}"


def test_the_table_of_options_is_that_of_the_code():
    from docs import options as script

    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == script.page(), (
        "run: python -m docs.options"
    )


def test_every_option_is_documented_with_its_meaning():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    wrong = []
    for option in options():
        row = re.search(rf"^\| `{re.escape(option)}` \|(.*)\|$", text, re.M)
        if not row or len(row[1].split("|")[-1].strip()) <= 5:
            wrong.append(option)
    assert not wrong, wrong


def test_a_default_is_as_one_writes_it_on_the_command_line():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    defaults = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.M))
    assert defaults["planner"] == "`none`" and defaults["objective"] == "`likelihood`"
    assert not [name for name, default in defaults.items() if "(" in default]


def test_every_route_of_the_server_is_documented():
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in (ROOT / "decisionllm" / "bidding" / "server").glob("*.py")
    )
    paths = set(re.findall(r"\broutes?r?\.(?:get|post|delete)\(\s*\"(/[^\"]+)\"", sources))
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    assert len(paths) > 8
    for path in paths:
        assert f"{path}`" in page, path


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {page.name for page in (ROOT / "docs").glob("*.md")} == set(
        re.findall(r": (\w+\.md)$", text, re.M)
    )


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs")
    made = subprocess.run(
        [
            sys.executable,
            "-m",
            "mkdocs",
            "build",
            "--strict",
            "--quiet",
            "--config-file",
            "mkdocs.yml",
            "--site-dir",
            str(tmp_path),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "http_proxy": "http://127.0.0.1:9"},
        encoding="utf-8",
    )
    assert made.returncode == 0, made.stderr
    for page in tmp_path.rglob("*.html"):
        assert not re.findall(
            r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?https?://(?!127)",
            page.read_text(encoding="utf-8"),
        ), page.name
    assert (tmp_path / "images" / "tokens.svg").is_file()
    assert not dead_links(tmp_path)


def dead_links(site):
    """Return the links of a built site that lead to no file of it: "page: target"."""
    dead = []
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for target in set(re.findall(r'(?:href|src)="([^"#?]+)', text)):
            folder = (
                site if target.startswith("/") else page.parent
            )  # 404.html is asked for anywhere
            is_local = not re.match(r"\w+:", target)
            if is_local and not (folder / target.lstrip("/")).exists():
                dead.append(f"{page.relative_to(site)}: {target}")
    return dead


def test_an_extra_is_installed_from_the_checkout():
    """The package is in no index: `pip install -e '.[llm]'`, not the name of the package."""
    folders = (*SOURCES, "configs", "deploy", ".github")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*") if file.is_file()]
    wrong = []
    for file in [*files, *ROOT.glob("*.md"), ROOT / "Makefile"]:
        if file.suffix not in ("", ".py", ".md", ".yaml", ".yml", ".ipynb", ".sh"):
            continue
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            # the image installs a wheel that was built before
            if FROM_INDEX.search(line) and "--no-index" not in line:
                wrong.append(f"{file.relative_to(ROOT)}: {line.strip()}")
    assert not wrong


def test_the_files_of_the_forge_are_yaml():
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        assert yaml.safe_load(path.read_text(encoding="utf-8")), path
