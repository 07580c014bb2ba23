/* The machines that the stand-in can be. FAKEGPU names one of MACHINES, or is a list of CARDS in
 * CUDA's order, e.g. FAKEGPU=4090 or FAKEGPU=3060,titan-rtx. */
#pragma once
#include <stdint.h>

#define MAX_DEVICES 16
#define MIB (1ull << 20)
#define GIB (1ull << 30)

typedef struct {
  const char *key, *name;
  int capability[2], sms, l2_mib;
  int shared_kib[2]; /* of a block that opts in, and of a multiprocessor */
  int threads_per_sm;
  double gib; /* as CUDA tells it */
  int integrated, host_page_tables;
  int pcie[3]; /* generation, lanes that are used, lanes that card and slot have */
  int watts[2]; /* limit, usual limit */
  int display, hides_process_memory, has_no_memory_info;
  const char *slice_of; /* of a MIG slice: the card that NVML lists in its place */
} Card;

#define AMPERE .shared_kib = {99, 100}, .threads_per_sm = 1536
#define TURING .capability = {7, 5}, .shared_kib = {64, 64}, .threads_per_sm = 1024
#define A100 .capability = {8, 0}, .shared_kib = {163, 164}, .threads_per_sm = 2048
#define HOPPER .capability = {9, 0}, .shared_kib = {227, 228}, .threads_per_sm = 2048
#define ADA_4090 .name = "NVIDIA GeForce RTX 4090", .capability = {8, 9}, .sms = 128, .l2_mib = 72, AMPERE, .gib = 23.64
#define FULL_SLOT(generation) .pcie = {generation, 16, 16}
#define WATTS(usual) .watts = {usual, usual}

static const Card CARDS[] = {
    {"4090", ADA_4090, FULL_SLOT(4), WATTS(450)},
    {"4090-display", ADA_4090, .pcie = {4, 8, 16}, WATTS(450), .display = 1},
    {"4090-wsl", ADA_4090, FULL_SLOT(4), WATTS(450), .display = 1, .hides_process_memory = 1},
    {"4090-laptop", "NVIDIA GeForce RTX 4090 Laptop GPU", {8, 9}, 76, 64, AMPERE, .gib = 15.69,
     .pcie = {4, 8, 8}, .watts = {80, 150}, .display = 1},
    {"3060", "NVIDIA GeForce RTX 3060", {8, 6}, 28, 3, AMPERE, .gib = 11.76, FULL_SLOT(4), WATTS(170)},
    {"2080-ti", "NVIDIA GeForce RTX 2080 Ti", TURING, .sms = 68, .l2_mib = 6, .gib = 10.76, FULL_SLOT(3), WATTS(250)},
    {"titan-rtx", "NVIDIA TITAN RTX", TURING, .sms = 72, .l2_mib = 6, .gib = 23.64, FULL_SLOT(3), WATTS(280)},
    {"v100", "Tesla V100-SXM2-16GB", {7, 0}, 80, 6, {96, 96}, 2048, 15.77, FULL_SLOT(3), WATTS(300)},
    {"5090", "NVIDIA GeForce RTX 5090", {12, 0}, 170, 96, AMPERE, .gib = 31.37, FULL_SLOT(5), WATTS(575)},
    {"a100", "NVIDIA A100-SXM4-80GB", A100, .sms = 108, .l2_mib = 40, .gib = 79.25, FULL_SLOT(4), WATTS(400)},
    {"a100-slice", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", A100, .sms = 42, .l2_mib = 20, .gib = 39.25, .slice_of = "a100"},
    {"a100-vgpu", "GRID A100D-20C", A100, .sms = 108, .l2_mib = 40, .gib = 19.99},
    {"h100", "NVIDIA H100 80GB HBM3", HOPPER, .sms = 132, .l2_mib = 50, .gib = 79.18, FULL_SLOT(5), WATTS(700)},
    {"gh200", "NVIDIA GH200 480GB", HOPPER, .sms = 132, .l2_mib = 60, .gib = 94.5, .host_page_tables = 1, WATTS(900)},
    {"gb10", "NVIDIA GB10", {12, 1}, 48, 24, AMPERE, .gib = 119.6, .integrated = 1, .host_page_tables = 1, .has_no_memory_info = 1},
    {"thor", "NVIDIA Thor", {11, 0}, 20, 32, {227, 228}, 1536, 122.8, .integrated = 1, .host_page_tables = 1, .has_no_memory_info = 1},
};

typedef struct {
  const char *key, *cards; /* in CUDA's order, the fastest first */
  int is_reversed_in_nvml;
  const char *driver;
  int cuda_driver; /* 12020 is 12.2 */
  int driver_error; /* of cuInit, a CUresult */
  int runtime_error; /* of the CUDA runtime alone, a cudaError_t */
  int nvml_error, handle_error, query_error; /* of nvmlInit, of each device, of what only some may ask */
  int other_processes;
} Machine;

static const Machine MACHINES[] = {
    {"busy", "4090", .other_processes = 2},
    {"titan-and-3060", "titan-rtx,3060", .is_reversed_in_nvml = 1},
    {"old-driver", "4090", .driver = "535.183.01", .cuda_driver = 12020, .runtime_error = 35},
    {"updated-not-rebooted", "4090", .driver_error = 803, .nvml_error = 18},
    {"no-permission", "4090", .query_error = 4},
    {"off-the-bus", "4090", .driver_error = 999, .handle_error = 15},
    {"no-utility", "4090", .nvml_error = 12},
    {"driver-not-loaded", "", .driver_error = 100, .nvml_error = 9},
    {"wsl2", "4090-wsl", .driver = "581.29", .other_processes = 1},
};
