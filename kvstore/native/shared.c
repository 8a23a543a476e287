/* Numbers in memory that the processes of one host share (kvstore/host/tables.py has their meaning). */
#include "native.h"

/* Adds to a number, and orders the loads and stores before it and those after it, for all processes; returns the sum.
 * `file` is for Python, which locks it. */
KV_PUBLIC int64_t kv_shared_add(int file, int64_t *number, int64_t delta) {
    (void)file;
    int64_t sum = __atomic_add_fetch(number, delta, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return sum;
}
