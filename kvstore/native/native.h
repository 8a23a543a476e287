/* The structures and functions that the parts of the native library share; `library.py` declares the same to Python.
 *
 * The library does the common good case of the data path without the GIL, and only that. Any chunk that is not whole,
 * cached and right gets a status that says so, and Python does that chunk from scratch. So every rule about damage,
 * errors and slow devices is in one place, in Python. */
#ifndef KVSTORE_NATIVE_H
#define KVSTORE_NATIVE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#define KV_ABI 18
#define KV_PUBLIC __attribute__((visibility("default")))
/* Each verification has a unique name: tests/mutants builds libraries in which one of them always holds, and shows that
 * a test then fails. Here both macros are the plain verification. */
#ifndef KV_CHECK
#define KV_CHECK(name, holds) (holds)
#define KV_SAME(found, wanted, size) (!memcmp(found, wanted, size))
#endif
#define KV_ADDRESS_BYTES 16
#define KV_DIGEST_BYTES 32
#define KV_FIXED_BYTES 128
#define KV_IOV_MAX 1024
#define KV_PATH_MAX 4096

enum {
    KV_DONE = 0,      /* read and verified, or staged and complete */
    KV_ABSENT = 1,    /* there is no such file */
    KV_FOUND = 2,     /* a put found a file of the right size */
    KV_BLOCKED = 3,   /* its file is open; the wanted bytes are not in the page cache */
    KV_OTHER = 4,     /* Python finds out what it is */
    KV_PUBLISHED = 5, /* the staged file has its final name */
};

/* Facts that all chunks of one call share. */
typedef struct {
    const char *root;                /* absolute path without a trailing slash */
    const char *session;             /* staging folder's last part; only for puts */
    uint8_t digest[KV_DIGEST_BYTES]; /* of the namespace */
    uint32_t kind;
    uint32_t shard_bits;
    uint32_t may_wait;               /* reading memory file systems never waits, and they do not know RWF_NOWAIT */
    uint32_t durable;
    uint32_t direct;                 /* uncached data will be read around the page cache */
    uint32_t from_images;            /* a put's sections lie in images, behind their headers */
} kv_run;

/* One chunk: its identity, where its sections lie, and its status. Section s lies at bases[s] + offset; if bases is
 * NULL, at offset + s * section_bytes. */
typedef struct {
    uint8_t address[KV_ADDRESS_BYTES];
    uint8_t parent[KV_ADDRESS_BYTES];
    uint8_t incarnation[KV_ADDRESS_BYTES]; /* only for puts and for making images */
    const uint8_t *identity;
    const uint64_t *bases;
    uint64_t offset;
    uint64_t section_bytes;
    uint64_t number;                       /* of the staging name; only for puts */
    int64_t mtime_ns;                      /* found by a read, given by a put */
    const uint8_t *descent;                /* of a block that is put: its size (4 bytes) and bytes; NULL for none */
    uint32_t section_count;
    uint32_t header_bytes;                 /* 0: a block of any size, which is only looked for */
    uint32_t identity_bytes;
    uint32_t depth;
    int32_t fd;                            /* -1 if none is open */
    int32_t status;
} kv_chunk;

/* Permission to write into a caller's memory (kvstore/core/buffers.py), as native code asks for it. */
typedef struct {
    int32_t stop;  /* not 0 once the caller wants its memory back */
    int32_t users; /* threads that write into it now */
} kv_borrowed;

/* One thread's turn at the chunks of a run, which it shares with others. */
typedef struct {
    int64_t *next;        /* shared by all: the first chunk that no thread took yet */
    int64_t step;         /* chunks taken at a time */
    int64_t most;         /* chunks that end the turn, at least `step` */
    int64_t files;        /* files that may be open at the same time, at least `step` */
    int64_t header_bytes; /* of the largest header of all chunks of the run */
    int32_t *reported;    /* out: a read's chunks that are not KV_DONE, or all of a put's; room for `most` + `step` */
    int64_t reported_count;
    uint64_t bytes;       /* out: of the sections that it read or wrote */
    const int32_t *abandoned; /* only for puts: if not NULL, each step publishes what it staged while this is 0 */
    int64_t time_ns;      /* only for puts: ends the turn, after at least one step */
} kv_turn;

/* The hash of one section while its bytes arrive in order; they must lie in one piece. */
typedef struct {
    uint64_t lanes[8];
    uint64_t blocks_done;
} kv_hash;

/* Progress of verifying a chunk: all sections before `section` are right, and `hash` has begun on that one. */
typedef struct {
    kv_hash hash;
    uint32_t section;
} kv_verified;

/* Progress of receiving a chunk's file over a socket: all zero at its beginning. */
typedef struct {
    kv_hash hash;
    uint64_t passed; /* bytes of the payload that are in their sections */
    uint64_t came;   /* bytes after those; before the first section also the header's */
} kv_arrival;

/* Progress of receiving rows over a socket: all zero at its beginning. */
typedef struct {
    kv_arrival sections;
    kv_hash row;
} kv_rows_arrival;

/* Progress of sending a run over a socket: all zero at its beginning. */
typedef struct {
    kv_hash hash;
    uint64_t sent; /* and summed */
} kv_departure;

/* A table of kvstore/engine/chunk_store.py: its arrays, and the mask of a print that gives its entry. */
typedef struct {
    uint64_t *prints;
    uint32_t *marks;
    uint64_t mask;
} kv_known;

/* A file mapped for reading (reading.c). */
typedef struct kv_mapping kv_mapping;

/* Functions that Python calls: `library.py` declares each once more, and a test compares the two
 * (tests/native/test_library.py). */

int kv_abi(void);
void kv_addresses(const uint8_t *digest, const uint8_t *parent, const uint8_t *packed, uint64_t chunk_bytes,
                  uint64_t count, uint8_t *addresses);
int kv_use_vectors(int wanted);
int kv_use_width(int widest);
int kv_use_rotation(int widest);
int kv_use_straight(int wanted);

uint64_t kv_checksum(const uint8_t *bytes, uint64_t size);
void kv_hash_begin(kv_hash *hash);
void kv_hash_absorb(kv_hash *hash, const uint8_t *bytes, uint64_t size, uint64_t arrived);
uint64_t kv_hash_end(kv_hash *hash, const uint8_t *bytes, uint64_t size);

void kv_open(const kv_run *run, kv_chunk *chunks, int64_t count);
void kv_close(kv_chunk *chunks, int64_t count);
int64_t kv_read(const kv_run *run, kv_chunk *chunks, int64_t count, const kv_borrowed *borrowed);
int kv_read_turn(const kv_run *run, kv_chunk *chunks, int64_t count, kv_turn *turn, kv_borrowed *borrowed);
int kv_withdraw(kv_borrowed *borrowed);
int64_t kv_read_cold(int fd, uint8_t *memory, uint64_t size, uint64_t offset);
int kv_read_direct(int fd);
int kv_take(const kv_run *run, const kv_chunk *chunk, uint8_t *header, kv_verified *verified, const uint8_t *memory,
            uint64_t size, uint64_t offset);
void kv_open_parts(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images, uint64_t *tables);
void kv_read_parts(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images, const uint64_t *tables,
                   uint32_t first, uint32_t many);
void kv_map_files(const kv_run *run, kv_chunk *chunks, int64_t count, kv_mapping **mapped);
int64_t kv_map_at_most(int64_t most);

void kv_look(const kv_run *run, kv_chunk *chunks, int64_t count);
int kv_stage_turn(const kv_run *run, kv_chunk *chunks, int64_t count, kv_turn *turn);
void kv_publish(const kv_run *run, kv_chunk *chunks, const int32_t *places, int64_t count, int ordered);

void kv_images_make(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images);
void kv_images_take(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images);
void kv_images_verify(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images);
void kv_images_tables(const kv_run *run, kv_chunk *chunks, int64_t count, const uint64_t *images, uint64_t *tables);
void kv_copy_rows(const uint64_t *to, const uint64_t *from, int64_t count, uint64_t start, uint64_t size);
void kv_rotate(const uint64_t *planes, int64_t plane_count, const float *cosines, const float *sines, int64_t count,
               int64_t heads, int64_t head_dim, int64_t pairs, int type, int interleaved);

int kv_receive(const kv_run *run, const kv_chunk *chunk, uint8_t *header, kv_arrival *arrival, int fd);
int kv_receive_rows(const kv_chunk *chunk, uint32_t parts, uint64_t *sums, uint64_t *row_sums, kv_rows_arrival *arrival,
                    int fd);
int kv_send(const kv_chunk *chunk, uint64_t *sums, kv_departure *departure, int fd);

int64_t kv_known_add(const kv_known *known, const kv_chunk *chunks, const int32_t *places, int64_t count, int32_t status,
                     uint32_t mark, int64_t renewed_ns, uint64_t *payload);
void kv_known_have(const kv_known *known, const uint8_t *addresses, int64_t count, uint32_t least, uint32_t bits,
                   uint8_t *found);
int64_t kv_shared_add(int file, int64_t *number, int64_t delta);
void kv_known_forget(const kv_known *known, const kv_chunk *chunks, const int32_t *places, int64_t count, int32_t status);

/* Functions that only the parts of the library call. */

uint8_t *kv_section(const kv_chunk *chunk, uint32_t section);
uint64_t kv_padded(uint64_t size);
uint32_t kv_largest_header(const kv_chunk *chunks, int64_t count);
void kv_header_begin(const kv_run *run, const kv_chunk *chunk, uint8_t *header);
void kv_header_end(const kv_chunk *chunk, uint8_t *header);
int kv_header_fits(const kv_run *run, const kv_chunk *chunk, const uint8_t *header);
const uint64_t *kv_table(const kv_chunk *chunk, const uint8_t *header);
int kv_verify(const kv_chunk *chunk, const uint64_t *table, kv_verified *verified, uint64_t arrived);
int kv_take_part(const kv_chunk *chunk, const uint8_t *image, const uint64_t *table, uint32_t first, uint32_t many);
int kv_chunk_path(const kv_run *run, const kv_chunk *chunk, char *path);
int64_t kv_take_step(const kv_turn *turn, int64_t count, int64_t *first);
int kv_staged_path(const kv_run *run, const kv_chunk *chunk, char *path);

/* A piece of a chunk on its way from a file or a socket into its sections. It lies in memory of ours that stays in L2,
 * where it is verified and copied on. It is aligned as files are, which makes the kernel's copying fast; the caller's
 * memory often is not (docs/performance-notes.md). */

#ifndef PIECE_BYTES
#define PIECE_BYTES (256 << 10) /* one read; it is still in L2 when it is hashed and copied on (docs/performance-notes.md) */
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
