/* A piece of a chunk on its way from a file or a socket into its sections. It lies in memory of ours that stays in L2,
 * where it is verified and copied on. It is aligned as files are, which makes the kernel's copying fast; the caller's
 * memory often is not (benchmarks/NOTES.md). */
#ifndef KVSTORE_PIECES_H
#define KVSTORE_PIECES_H

#include "native.h"

#include <sys/uio.h>

#ifndef PIECE_BYTES
#define PIECE_BYTES (256 << 10) /* one read; it is still in L2 when it is hashed and copied on (benchmarks/NOTES.md) */
#endif
#define PIECE_TAIL 2048 /* the end of a hash looks back a little, so a section's last piece is at least this large */

extern _Thread_local uint8_t kv_piece[PIECE_BYTES + PIECE_TAIL];

uint64_t kv_payload_bytes(const kv_chunk *chunk);
uint64_t kv_piece_bytes(const kv_chunk *chunk, uint64_t at);
int kv_pass(const kv_chunk *chunk, const uint64_t *table, uint64_t *sums, kv_hash *hash, uint64_t at, uint64_t length,
            int taken);
int kv_vectors(const kv_chunk *chunk, uint64_t at, uint64_t stop, struct iovec *parts, int most);
void kv_sum(const kv_chunk *chunk, uint64_t *sums, kv_hash *hash, uint64_t at, uint64_t stop);

#endif
