"""What this machine allows kvdisk to do, found out by trying.

`kvdisk doctor` must say why kvdisk is slow, or does not start at all, so everything here works
without the native module, and the engine may ask the same questions when it falls back, so that a
warning in a server's log and a line of the doctor agree.

What always holds: a probe answers with a value and never raises for something the system says;
what it creates, it removes; it imports neither torch nor numpy, makes no CUDA context, changes no
setting. The modules: ``uring`` (io_uring), ``direct`` (a real file in the directory), ``mount``
(the file system), ``device`` (the disk), ``host`` (limits, NUMA, CUDA); ``process_checks`` and
``storage_checks`` judge what those found, ``checks`` runs them all.
"""

from kvdisk.probe.checks import run_checks
from kvdisk.probe.verdict import Check

__all__ = ["Check", "run_checks"]
