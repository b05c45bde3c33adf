"""Calls of other libraries and ours, the rows of docs/migrating.md, which tests run.

row.py        a row, and how its two sides are run
torchao.py    others.py    the rows
"""

from tests.support.migrating import others, torchao
from tests.support.migrating.row import Library

LIBRARIES: tuple[Library, ...] = (*torchao.LIBRARIES, *others.LIBRARIES)
