"""What ``kvdisk replay`` does: a recorded or generated workload against the tier, to size a disk.

A trace says which blocks each request needs and when it came. Replaying it tells the hit rate, the
traffic, the load latency and the time to first token that follows from a stated model, for several
capacities and policies; on a real file with every loaded byte compared, or by the allocator and
policies alone.

What always holds: real and simulated runs make the same calls in the same order, so their hit rates
can be compared; content is a function of the block's id, so a load can be proved without keeping
what was stored; nothing is left behind, whatever ends the process.

Imports point down: ``session -> {run, simulate, curve} -> {content, ttft, result} -> job ->
{synthetic, trace}``, and ``report`` and ``plot`` above them.
"""
