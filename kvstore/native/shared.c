/* Numbers in memory that the processes of one host share (kvstore/host/shared.py has their meaning). */
#include "native.h"

/* Adds to a number; returns the sum. */
KV_PUBLIC int64_t kv_shared_add(int64_t *number, int64_t delta) { return __atomic_add_fetch(number, delta, __ATOMIC_SEQ_CST); }

/* Orders the loads and stores before it and those after it, for all processes. */
KV_PUBLIC void kv_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
