"""Ranks that take different numbers of steps in TensorFlow, and wait for each other in hvd.join().

Without the patch tensorflow-join, only the first join of a process waits: sums are wrong from the
second round on.
"""

from __future__ import annotations

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
for _ in range(5):
    for step in range(1 + hvd.rank()):
        total = hvd.allreduce(tf.ones(3), op=hvd.Sum, name="join")
        assert total.numpy().tolist() == 3 * [hvd.size() - step], (step, total)
    assert int(hvd.join()) == hvd.size() - 1
hvd.shutdown()
