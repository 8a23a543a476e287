/* Files mapped for reading, as DLPack tensors of bytes (DLManagedTensor of dlpack.h, before version 1): numpy owns
 * them, and calls `release` when neither they nor any slice of them lives.
 *
 * That call is plain C. In Python it would be a finalizer, which the garbage collector can start in the middle of
 * anything, and which a signal's handler can break off. */
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
    /* Fields of ours from here on. */
    void *start;
    uint64_t size;
    int64_t bytes;
};

enum { ON_CPU = 1, UNSIGNED = 1 };

/* A quarter of the mappings that Linux allows a process (vm.max_map_count): the engine's allocators need mappings as
 * well. */
static int64_t mapped_most = 16384;
static int64_t mapped_count;

/* Sets how many files may be mapped at once, unless `most` is negative; returns how many are. */
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
    /* Accessing a page behind the end of a file kills the process (SIGBUS). */
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
