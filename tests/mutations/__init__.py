"""Kernels with one synchronization deleted or changed, by name: the emulator must find each of MUTATIONS out."""

from tests.mutations.barriers import BARRIERS
from tests.mutations.groups import GROUPS
from tests.mutations.harmless import HARMLESS
from tests.mutations.loads import LOADS
from tests.mutations.products import PRODUCTS
from tests.mutations.record import KERNELS
from tests.mutations.results import RESULTS
from tests.mutations.sums import SUMS

__all__ = ["HARMLESS", "KERNELS", "MUTATIONS"]

MUTATIONS = BARRIERS | GROUPS | LOADS | PRODUCTS | RESULTS | SUMS
