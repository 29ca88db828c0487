"""The packages of the project: ups and those beside it."""

from ups.common.place import ROOT

PACKAGES = sorted(path.parent.name for path in ROOT.glob("ups*/__init__.py"))
