"""Reports of programs: where the error enters, what is still float, which kernel ran, what another format would cost.

values.py      types and histograms of values        rows.py       the rows of a report
pairing.py     which nodes of two programs belong together
measuring.py   what is measured while they run       listing.py    rows, from what was measured
comparing.py   compare                               report.py     Report
words.py       a report in words                     picture.py    pictures, by matplotlib
page.py        a report as a page of HTML, with page.html, page.css and page.js
trying.py      sweep                                 sweeping.py   Sweep
operations.py  time and FLOPs of operations, PyTorch's and ours
journal.py     what of a sweep is done               plain.py      values as JSON has them
"""

from hop.report.comparing import compare as compare
from hop.report.operations import Operation as Operation
from hop.report.operations import operations as operations
from hop.report.operations import table as table
from hop.report.report import Report as Report
from hop.report.rows import Error as Error
from hop.report.rows import Row as Row
from hop.report.rows import Source as Source
from hop.report.spread import Spread as Spread
from hop.report.sweep_result import Candidate as Candidate
from hop.report.sweep_result import Sweep as Sweep
from hop.report.sweeps import CANDIDATES as CANDIDATES
from hop.report.sweeps import Options as Options
from hop.report.sweeps import sweep as sweep
from hop.report.values import Type as Type

__all__ = [
    "CANDIDATES",
    "Candidate",
    "Error",
    "Options",
    "Report",
    "Row",
    "Source",
    "Spread",
    "Sweep",
    "Type",
    "compare",
    "sweep",
]
