#define _GNU_SOURCE
#include "state.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

Counts counts;
const Machine *machine;
Device all_devices[MAX_DEVICES], *devices[MAX_DEVICES];
int num_all_devices, num_devices;

/* ---- the machine ---- */

static const Card *find_card(const char *key) {
  for (size_t i = 0; i < sizeof CARDS / sizeof *CARDS; i++)
    if (!strcmp(CARDS[i].key, key)) return &CARDS[i];
  fprintf(stderr, "fakegpu: there is no card %s in machines.h\n", key);
  abort();
}

static const Machine *find_machine(const char *key) {
  for (size_t i = 0; i < sizeof MACHINES / sizeof *MACHINES; i++)
    if (!strcmp(MACHINES[i].key, key)) return &MACHINES[i];
  static Machine plain;
  plain = (Machine){.key = key, .cards = key};
  return &plain;
}

static void place_cards(Device **fastest_first) {
  char keys[256], *rest;
  const Card *cards[MAX_DEVICES];
  int count = 0;
  snprintf(keys, sizeof keys, "%s", machine->cards);
  for (char *key = strtok_r(keys, ",", &rest); key; key = strtok_r(0, ",", &rest)) cards[count++] = find_card(key);
  for (int i = 0; i < count; i++) {
    int slot = machine->is_reversed_in_nvml ? count - 1 - i : i;
    all_devices[slot] = (Device){.card = cards[i], .slot = slot};
    fastest_first[i] = &all_devices[slot];
  }
  num_all_devices = count;
}

static Device *find_visible(const char *entry, Device **fastest_first) {
  char uuid[64], *end;
  long index = strtol(entry, &end, 10);
  if (end != entry && !*end) return index >= 0 && index < num_all_devices ? fastest_first[index] : 0;
  for (int i = 0; i < num_all_devices; i++) {
    print_uuid(fastest_first[i], uuid);
    if (strlen(entry) > 4 && !strncasecmp(entry, uuid, strlen(entry))) return fastest_first[i];
  }
  return 0;
}

static void start_once(void) {
  const char *asked = getenv("FAKEGPU"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  Device *fastest_first[MAX_DEVICES];
  char entries[256], *rest;
  machine = find_machine(asked ? asked : "4090");
  place_cards(fastest_first);
  if (!visible) {
    memcpy(devices, fastest_first, sizeof devices);
    num_devices = num_all_devices;
    return;
  }
  snprintf(entries, sizeof entries, "%s", visible);
  for (char *entry = strtok_r(entries, ",", &rest); entry; entry = strtok_r(0, ",", &rest)) {
    Device *device = find_visible(entry, fastest_first);
    if (!device) break; /* what follows is hidden, too */
    devices[num_devices++] = device;
  }
}

static pthread_once_t once = PTHREAD_ONCE_INIT;
void start_machine(void) { pthread_once(&once, start_once); }

int uses_after_fork(void) {
  static pid_t starter;
  if (!starter) starter = getpid();
  return starter != getpid();
}

void write_uuid(const Device *device, unsigned char *bytes) {
  for (int i = 0; i < 16; i++) bytes[i] = (unsigned char)(0xa0 + device->slot * 16 + i);
}

void print_uuid(const Device *device, char *text) {
  unsigned char bytes[16];
  write_uuid(device, bytes);
  text += sprintf(text, device->card->slice_of ? "MIG-" : "GPU-");
  for (int i = 0; i < 16; i++) text += sprintf(text, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
}

uint64_t card_bytes(const Card *card) { return (uint64_t)(card->gib * GIB) / MIB * MIB; }

/* ---- blocks of memory, sorted by address ---- */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Block *blocks;
static int num_blocks, room;

void lock_state(void) { pthread_mutex_lock(&mutex); }
void unlock_state(void) { pthread_mutex_unlock(&mutex); }

static int first_after(uint64_t address) {
  int low = 0, high = num_blocks;
  while (low < high) {
    int middle = (low + high) / 2;
    if (blocks[middle].begin <= address) low = middle + 1;
    else high = middle;
  }
  return low;
}

void add_block(uint64_t begin, uint64_t size, Place place, int device) {
  if (num_blocks == room) blocks = realloc(blocks, (room = 2 * room + 64) * sizeof *blocks);
  int at = first_after(begin);
  memmove(blocks + at + 1, blocks + at, (num_blocks++ - at) * sizeof *blocks);
  blocks[at] = (Block){begin, size, place, device};
  if (place == HOST) counts.pinned_bytes += size;
}

Block *block_at(uint64_t address) {
  int at = first_after(address) - 1;
  return at >= 0 && address < blocks[at].begin + blocks[at].size ? &blocks[at] : 0;
}

void remove_block(Block *block) {
  if (block->place == HOST) counts.pinned_bytes -= block->size;
  int at = block - blocks;
  memmove(block, block + 1, (--num_blocks - at) * sizeof *blocks);
}

int is_mapped(uint64_t begin, uint64_t size) {
  for (uint64_t end = begin + size; begin < end;) {
    Block *block = block_at(begin);
    if (!block) return 0;
    begin = block->begin + block->size;
  }
  return 1;
}

int take_memory(int device, uint64_t bytes) {
  Device *own = devices[device];
  if (own->used + bytes > card_bytes(own->card)) return 0;
  own->used += bytes;
  if (own->used > own->peak) own->peak = own->used;
  return 1;
}

/* ---- what a test reads ---- */

API int64_t fakegpu_count(const char *name) {
#define AS_ANSWER(field) if (!strcmp(name, #field)) return (int64_t)counts.field;
  COUNTS(AS_ANSWER)
  return -1;
}

API uint64_t fakegpu_used_bytes(int device) { return device < num_devices ? devices[device]->used : 0; }
API int fakegpu_has_context(int device) { return device < num_devices && devices[device]->has_context; }
