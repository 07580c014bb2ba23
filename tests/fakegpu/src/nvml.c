/* NVML, which numbers devices by their slot and sees those that CUDA hides. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "state.h"

#define SUCCESS 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7

/* A handle counts from 1; that of a MIG slice is MAX_DEVICES further than its card's. */
typedef uintptr_t Handle;

static Device *device_of(Handle handle) { return &all_devices[(handle - 1) % MAX_DEVICES]; }
static int is_slice(Handle handle) { return handle > MAX_DEVICES; }

static const Card *card_of(Handle handle) {
  const Card *card = device_of(handle)->card;
  for (size_t i = 0; !is_slice(handle) && card->slice_of && i < sizeof CARDS / sizeof *CARDS; i++)
    if (!strcmp(CARDS[i].key, card->slice_of)) return &CARDS[i];
  return card;
}

API int nvmlInitWithFlags(unsigned flags) {
  start_machine();
  return machine->nvml_error;
}

API int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API int nvmlShutdown(void) { return SUCCESS; }

API const char *nvmlErrorString(int error) {
  switch (error) {
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 12: return "NVML Shared Library Not Found";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
  }
}

API int nvmlSystemGetDriverVersion(char *text, unsigned room) {
  snprintf(text, room, "%s", machine->driver ? machine->driver : "580.95.05");
  return SUCCESS;
}

API int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = machine->cuda_driver ? machine->cuda_driver : 13000;
  return SUCCESS;
}

API int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = num_all_devices;
  return SUCCESS;
}

API int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
  if (machine->handle_error) return machine->handle_error;
  if (index >= (unsigned)num_all_devices) return INVALID_ARGUMENT;
  *handle = 1 + index;
  return SUCCESS;
}

API int nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
  char text[64];
  for (int slot = 0; slot < num_all_devices; slot++) {
    print_uuid(&all_devices[slot], text);
    if (strcmp(text, uuid)) continue;
    *handle = 1 + slot + (all_devices[slot].card->slice_of ? MAX_DEVICES : 0);
    return machine->handle_error;
  }
  return NOT_FOUND;
}

API int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Handle *handle) {
  unsigned domain, number;
  if (sscanf(bus, "%x:%x", &domain, &number) != 2 || !number || number > (unsigned)num_all_devices) return NOT_FOUND;
  *handle = number;
  return machine->handle_error;
}

API int nvmlDeviceGetUUID(Handle handle, char *text, unsigned room) {
  char own[64];
  print_uuid(device_of(handle), own);
  if (!is_slice(handle)) memcpy(own, "GPU", 3);
  snprintf(text, room, "%s", own);
  return SUCCESS;
}

API int nvmlDeviceGetName(Handle handle, char *text, unsigned room) {
  snprintf(text, room, "%s", card_of(handle)->name);
  return SUCCESS;
}

API int nvmlDeviceGetCudaComputeCapability(Handle handle, int *major, int *minor) {
  if (is_slice(handle)) return INVALID_ARGUMENT;
  *major = card_of(handle)->capability[0], *minor = card_of(handle)->capability[1];
  return SUCCESS;
}

/* A driver keeps some memory for itself, which CUDA does not count. */
#define RESERVED_BYTES (350 * MIB)
#define DISPLAY_BYTES (400 * MIB)
#define OTHER_BYTES (3 * GIB)

static uint64_t used_bytes(Handle handle) {
  const Card *card = card_of(handle);
  uint64_t others = machine->other_processes * OTHER_BYTES + (card->display ? DISPLAY_BYTES : 0);
  return device_of(handle)->used + others;
}

typedef struct {
  unsigned version;
  unsigned long long total, reserved, unused, used;
} Memory;

API int nvmlDeviceGetMemoryInfo_v2(Handle handle, Memory *memory) {
  if (card_of(handle)->has_no_memory_info) return NOT_SUPPORTED;
  memory->reserved = RESERVED_BYTES;
  memory->total = card_bytes(card_of(handle)) + RESERVED_BYTES;
  memory->used = used_bytes(handle);
  memory->unused = memory->total - memory->reserved - memory->used;
  return SUCCESS;
}

typedef struct {
  unsigned process;
  unsigned long long bytes;
  unsigned instance, compute_instance;
} Process;

static int list_processes(Handle handle, unsigned *room, Process *found, const Process *all, unsigned count) {
  if (machine->query_error) return machine->query_error;
  unsigned had = *room;
  *room = count;
  if (had < count) return INSUFFICIENT_SIZE;
  memcpy(found, all, count * sizeof *all);
  for (unsigned i = 0; i < count; i++)
    if (card_of(handle)->hides_process_memory) found[i].bytes = ~0ull;
  return SUCCESS;
}

API int nvmlDeviceGetComputeRunningProcesses_v3(Handle handle, unsigned *room, Process *found) {
  Process all[MAX_DEVICES];
  unsigned count = 0;
  for (int i = 0; i < machine->other_processes; i++) all[count++] = (Process){70000 + i, OTHER_BYTES, ~0u, ~0u};
  if (device_of(handle)->has_context) all[count++] = (Process){getpid(), device_of(handle)->used, ~0u, ~0u};
  return list_processes(handle, room, found, all, count);
}

/* By this name torch asks for them. */
API int nvmlDeviceGetComputeRunningProcesses(Handle handle, unsigned *room, Process *found) {
  return nvmlDeviceGetComputeRunningProcesses_v3(handle, room, found);
}

API int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle handle, unsigned *room, Process *found) {
  Process desktop = {900, DISPLAY_BYTES, ~0u, ~0u};
  return list_processes(handle, room, found, &desktop, card_of(handle)->display);
}

#define VALUE(name, value, is_known) \
  API int name(Handle handle, unsigned *found) { \
    const Card *card = card_of(handle); \
    if (!(is_known)) return NOT_SUPPORTED; \
    *found = (value); \
    return SUCCESS; \
  }
VALUE(nvmlDeviceGetMaxPcieLinkGeneration, card->pcie[0], card->pcie[0])
VALUE(nvmlDeviceGetCurrPcieLinkWidth, card->pcie[1], card->pcie[1])
VALUE(nvmlDeviceGetMaxPcieLinkWidth, card->pcie[2], card->pcie[2])
VALUE(nvmlDeviceGetEnforcedPowerLimit, card->watts[0] * 1000u, card->watts[0])
VALUE(nvmlDeviceGetPowerManagementDefaultLimit, card->watts[1] * 1000u, card->watts[1])
VALUE(nvmlDeviceGetPowerUsage, card->watts[0] * 900u, card->watts[0])
VALUE(nvmlDeviceGetDisplayActive, card->display, card->pcie[0])

API int nvmlDeviceIsMigDeviceHandle(Handle handle, unsigned *found) {
  *found = is_slice(handle);
  return SUCCESS;
}

API int nvmlDeviceGetClockInfo(Handle handle, int clock, unsigned *megahertz) {
  *megahertz = 2520;
  return SUCCESS;
}

API int nvmlDeviceGetTemperature(Handle handle, int sensor, unsigned *celsius) {
  *celsius = 41;
  return SUCCESS;
}

API int nvmlDeviceGetUtilizationRates(Handle handle, unsigned *percent) {
  if (is_slice(handle)) return NOT_SUPPORTED;
  percent[0] = 77, percent[1] = 20;
  return SUCCESS;
}

API int nvmlDeviceGetP2PStatus(Handle handle, Handle other, int capability, int *status) {
  *status = card_of(handle)->capability[0] == 9 ? 0 : 5; /* OK over NVLink, or not supported */
  return SUCCESS;
}

API int nvmlDeviceGetTopologyCommonAncestor(Handle handle, Handle other, int *level) {
  *level = 40; /* the same socket */
  return SUCCESS;
}

/* torch looks these up when memory runs out. */
#define ABSENT(name) \
  API int name() { return NOT_SUPPORTED; }
ABSENT(nvmlDeviceGetNvLinkRemoteDeviceType)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT(nvmlDeviceGetGpuFabricInfoV)
