"""Reports on programs: where quantization error enters, what is still float, which kernels ran, what other schemes
would cost.

values.py         types and float values of tensors     rows.py       the rows of a report
pairing.py        match the nodes of two programs       nodes.py      module paths of nodes
measuring.py      measure programs while they run       listing.py    rows from measurements
comparing.py      compare                               report.py     Report
summary.py        the sentences of a report             picture.py    matplotlib figures
page.py           the HTML page, from page.html, page.css and page.js
sweeps.py         sweep                                 sweep_result.py  Sweep
operations.py     time and FLOPs of PyTorch's operations and ours
journal.py        finished results of a sweep, on disk
spread.py         histograms of values
"""

from hop.report.comparing import compare as compare
from hop.report.operations import Operation as Operation
from hop.report.operations import operations as operations
from hop.report.operations import table as table
from hop.report.sweeps import CANDIDATES as CANDIDATES
from hop.report.sweeps import Options as Options
from hop.report.sweeps import sweep as sweep

__all__ = [
    "CANDIDATES",
    "Options",
    "compare",
    "sweep",
]
