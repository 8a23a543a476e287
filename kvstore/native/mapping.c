/* Files mapped for reading, as DLPack tensors of bytes (DLManagedTensor of dlpack.h, before version 1): numpy takes them over
 * and calls `release` when nothing cut from them lives any more.
 *
 * That is a call of C alone. In Python it would be a finalizer, which a garbage collection begins in the middle of
 * anything, and a signal's handler breaks off. */
#include "mapping.h"
#include "native.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

struct kv_mapping {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
    void *context;
    void (*release)(kv_mapping *mapping);
    /* From here on ours. */
    void *start;
    uint64_t size;
    int64_t bytes;
};

enum { ON_CPU = 1, UNSIGNED = 1 };

/* The allocators of the engine beside need mappings as well: a quarter of what Linux lets a process have (vm.max_map_count). */
static int64_t mapped_most = 16384;
static int64_t mapped_count;

/* How many files may be mapped at once from now on, unless that is negative; returns how many are. */
KV_PUBLIC int64_t kv_map_at_most(int64_t most) {
    if (most >= 0) __atomic_store_n(&mapped_most, most, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&mapped_count, __ATOMIC_SEQ_CST);
}

static void release(kv_mapping *mapping) {
    munmap(mapping->start, mapping->size);
    free(mapping);
    __atomic_sub_fetch(&mapped_count, 1, __ATOMIC_SEQ_CST);
}

kv_mapping *kv_map(int fd, uint64_t size, uint64_t first) {
    int64_t count = __atomic_add_fetch(&mapped_count, 1, __ATOMIC_SEQ_CST);
    struct stat found;
    void *start = MAP_FAILED;
    /* A page behind the end of a file kills whoever touches it. */
    if (KV_CHECK(maps_bounded, count <= __atomic_load_n(&mapped_most, __ATOMIC_SEQ_CST)) && !fstat(fd, &found) &&
        (uint64_t)found.st_size == size)
        start = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    kv_mapping *mapping = start == MAP_FAILED ? NULL : malloc(sizeof *mapping);
    if (!mapping) {
        if (start != MAP_FAILED) munmap(start, size);
        __atomic_sub_fetch(&mapped_count, 1, __ATOMIC_SEQ_CST);
        return NULL;
    }
    *mapping = (kv_mapping){
        .data = (uint8_t *)start + first, .device_type = ON_CPU, .ndim = 1, .type_code = UNSIGNED, .type_bits = 8,
        .type_lanes = 1, .shape = &mapping->bytes, .release = release, .start = start, .size = size,
        .bytes = (int64_t)(size - first),
    };
    return mapping;
}
