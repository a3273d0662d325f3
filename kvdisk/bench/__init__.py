"""What ``kvdisk bench`` measures and how: a performance engineer's view of kvdisk beside fio.

Two layers, so that a loss can be placed. ``raw`` is fio's job loop over our backend: what the
backend costs. ``whole`` is what a serving engine gets: blocks of a KV cache gathered, checksummed,
written to slots, recorded, and back. Each can be compared with fio, or with one I/O in flight on a
thread, in alternating rounds on the same machine.

What always holds: data is unique and incompressible and is read back and compared; whatever does
not measure the disk (memory file systems, the page cache) is said so beside the number; units are
exact; no file has a name while it is used, so nothing is left behind, whatever ends the process.

Imports point down: ``session -> {raw, whole, fio} -> {scratch, result} -> job -> presets``.
"""
