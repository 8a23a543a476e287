/* Files mapped for reading, which numpy takes over. */
#ifndef KVSTORE_MAPPING_H
#define KVSTORE_MAPPING_H

#include "native.h"

/* Maps a file of `size` bytes, of which those from `first` on are wanted; NULL if it cannot be mapped, or too many are.
 */
kv_mapping *kv_map(int fd, uint64_t size, uint64_t first);

#endif
