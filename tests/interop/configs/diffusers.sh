#!/bin/sh
# As in the README of the scripts.
export MODEL_NAME="Qwen/Qwen-Image"
export INSTANCE_DIR=photos
export DIFFUSERS_ATTN_BACKEND=flash

accelerate launch --mixed_precision bf16 train_dreambooth_lora_qwen_image.py \
  --pretrained_model_name_or_path=$MODEL_NAME  \
  --instance_data_dir="$INSTANCE_DIR" \
  --output_dir=trained \
  --mixed_precision="bf16" \
  --instance_prompt="a photo of sks dog" \
  --resolution=1024 \
  --train_batch_size=1 \
  --gradient_accumulation_steps=4 \
  --gradient_checkpointing \
  --bnb_quantization_config_path=diffusers_bnb.json \
  --use_8bit_adam \
  --rank 16 --lora_alpha 16 \
  --learning_rate=2e-4 \
  --lr_scheduler="constant" \
  --lr_warmup_steps=0 \
  --weighting_scheme logit_normal \
  --max_train_steps=500 \
  --with_prior_preservation \
  --seed="0"
