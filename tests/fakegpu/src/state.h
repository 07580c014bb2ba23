/* What the parts of the stand-in share: the machine, blocks of memory, and what is counted. */
#pragma once
#include <stddef.h>
#include "machines.h"

#define API __attribute__((visibility("default")))

typedef struct {
  const Card *card;
  int slot; /* on the bus: NVML's order, and what its UUID is made from */
  int has_context;
  uint64_t used, peak; /* bytes */
} Device;

typedef enum { HOST, DEVICE } Place;
typedef struct {
  uint64_t begin, size;
  Place place;
  int device;
} Block;

/* Each is also a name for fakegpu_count(). */
#define COUNTS(X) \
  X(launches) X(products) X(executions) X(generated_launches) X(streams) X(event_waits) \
  X(host_waits) X(copies_to_device) X(bytes_to_device) X(pageable_bytes_to_device) \
  X(copies_from_device) X(bytes_from_device) X(bytes_on_device) X(pinned_bytes)
#define AS_FIELD(name) uint64_t name;
typedef struct { COUNTS(AS_FIELD) } Counts;

extern Counts counts;
extern const Machine *machine; /* after start_machine() */
extern Device all_devices[MAX_DEVICES]; /* by slot */
extern int num_all_devices;
extern Device *devices[MAX_DEVICES]; /* in CUDA's order; CUDA_VISIBLE_DEVICES hides others */
extern int num_devices;

void start_machine(void);
int uses_after_fork(void); /* a driver that was started cannot be used by a fork */
void write_uuid(const Device *, unsigned char *bytes);
void print_uuid(const Device *, char *text);
uint64_t card_bytes(const Card *);

void lock_state(void);
void unlock_state(void);
void add_block(uint64_t begin, uint64_t size, Place, int device);
Block *block_at(uint64_t address); /* 0 if it is in none */
void remove_block(Block *);
int is_mapped(uint64_t begin, uint64_t size);
int take_memory(int device, uint64_t bytes); /* 0 if the device has too little */
